"""Problems of the ranks with an item: causes and victims, by phase.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

import pytest

from lockstep.backends import BROKEN_CONNECTION
from lockstep.protocol import SKIPS_ALL, VICTIM_OF_A_CASE, VICTIM_OF_A_TRIAL, Finished
from lockstep.reporting.differences import without_addresses, without_own_number
from lockstep.reporting.pytest_internals import ReprFileLocation, has_traceback, lines, messages
from lockstep.reporting.rank_reports import PHASES, Context, Phase, RankReports
from lockstep.tracebacks import user_line
from lockstep.world.diagnosis import place_of
from lockstep.world.outcome import STRICT_XPASS, Died, Stuck

_GLOO_RECEIVED_TOO_MUCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_ASSERTION = re.compile(r"Assertion [`'].{1,300}?['`] failed")
"""Matches what an assertion in C or in a kernel of an accelerator has written."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason for which one rank failed a phase."""

    rank: int
    at: float
    title: str
    """Follows "rank N": "failed", "died: SIGKILL", "waits in all_reduce #3 …"."""
    report: pytest.TestReport | None = None
    text: str = ""
    """Stacks, where there is no report."""
    output: str = ""
    """The rank's last output, where there is no report."""
    crash: ReprFileLocation | None = None
    is_mismatch: bool = False
    """True if ranks called a collective differently, as the diagnosis says."""

    def is_victim(self) -> bool:
        """Whether the rank only suffered from the failure of another."""
        return self.is_bystander() or any(
            VICTIM_OF_A_CASE in message or BROKEN_CONNECTION.search(message) for message in self._messages()
        )

    def is_bystander(self) -> bool:
        """Whether the rank only learned by a vote that a trial had failed on another."""
        return any(VICTIM_OF_A_TRIAL in message for message in self._messages())

    def _messages(self) -> list[str]:
        return [] if self.report is None else messages(self.report)

    def details(self) -> str:
        """Return the traceback, or stacks and last output where there is no report."""
        if self.report is not None:
            return self.report.longreprtext
        last = f"rank {self.rank}'s last output:\n{self.output}" if self.output else ""
        return "\n".join(filter(None, (self.text, last)))

    def shown(self) -> str:
        """Return the word for what `details` returns, "" if that is nothing."""
        if self.report is not None:
            return "traceback" if has_traceback(self.report) else "message"
        return "traceback" if self.text else "last output" if self.output else ""

    def keys(self) -> set[object]:
        """Return values of which problems have one in common where only one of them is to be shown.

        Those that differ by addresses, or each by the number of its own rank, are shown once.
        """
        if self.report is None:
            return {(self.title, without_addresses(self.text), without_addresses(self.output))}
        said, place = self.said(), lines(self.report)
        # As it stands, too: the same index (0, 1) on both ranks is no number of theirs.
        return {(said, place), (without_own_number(said, self.rank), place)}

    def said(self) -> str:
        """Return the messages of its exceptions, without addresses."""
        return without_addresses("\n".join(self._messages()))


def find_causes(problems: list[Problem]) -> list[Problem]:
    """Return those that are no victims; if all are, those that are no bystanders; else all.

    A rank that fails by itself goes on to the harness's own collectives; that the others' are different is
    a consequence.
    """
    causes = [problem for problem in problems if not problem.is_victim()]
    causes = [problem for problem in causes if not problem.is_mismatch] or causes
    return causes or [problem for problem in problems if not problem.is_bystander()] or problems


def find_problems(context: Context, ranks: list[RankReports]) -> dict[Phase, list[Problem]]:
    """Find the problems of an item. Those of set-up and call stand together in the first of the two."""
    found: dict[Phase, list[Problem]] = {phase: [] for phase in PHASES}
    for rank in ranks:
        for phase in PHASES:
            report = rank.phases.get(phase)
            if report is not None and report.failed:
                found[phase].append(_failure(rank.rank, report))
        if isinstance(rank.fate, Died):
            found[rank.reached()].append(_death(context, rank.rank, rank.fate))
    _add_silence(context, ranks, found)
    _add_disagreement(context, ranks, found)
    _add_stuck(context, ranks, found)
    if not any(found.values()):
        _add_unnoticed_mismatch(context, ranks, found)
    if not any(found.values()):
        _add_out_of_step(context, ranks, found)
    if _is_expected_failure(ranks, found):
        return {phase: [] for phase in PHASES}
    first = next((phase for phase in PHASES[:2] if found[phase]), None)
    if first is not None:
        causes = sorted(found["setup"] + found["call"], key=lambda problem: problem.at)
        found["setup"], found["call"] = [], []
        found[first] = causes
        # A tear-down that breaks after that because a peer is gone adds nothing.
        found["teardown"] = [problem for problem in found["teardown"] if not problem.is_victim()]
    return found


def _failure(rank: int, report: pytest.TestReport) -> Problem:
    # By an exception of lockstep.shm, which compares what ranks call.
    is_mismatch = any("CollectiveMismatch: " in message for message in messages(report))
    return Problem(rank, report.stop, "failed", report, is_mismatch=is_mismatch)


def _death(context: Context, rank: int, died: Died) -> Problem:
    why = died.how
    if match := _GLOO_RECEIVED_TOO_MUCH.search(died.output):
        # The check by which gloo aborts a process that receives more than its buffer holds.
        sizes = f"gloo received {match[1]} bytes where it expected {match[2]}"
        why += f" ({sizes}: shapes or dtypes differ between ranks)"
    elif "SIGABRT" in why and (match := _ASSERTION.search(died.output)):
        why += f" ({match[0]})"
    if died.importing:
        why += f" while importing {_relative(context, died.importing)}"
    where = user_line(died.output, str(context.item.config.invocation_params.dir))
    title = f"{why}, at {where}" if where else why
    return Problem(rank, died.at, title, output=died.output, crash=_crash(context, where, why))


def _crash(context: Context, where: str, message: str) -> ReprFileLocation:
    """Point to a `file:line in function`, or to the test if that is unknown."""
    if match := re.match(r"(.*):(\d+) in ", where):
        return ReprFileLocation(match[1], int(match[2]), message)
    path, lineno, _ = context.item.location
    return ReprFileLocation(path, (lineno or 0) + 1, message)


def _add_stuck(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """Blame a rank that was killed while it ran if nothing else explains that, or if it had failed before."""
    explained = any(not problem.is_victim() for problem in chain(*found.values()))
    stuck = [rank.fate for rank in ranks if isinstance(rank.fate, Stuck)]
    waits_alone = all(fate.status.state == "votes" for fate in stuck)
    for rank in ranks:
        if not isinstance(rank.fate, Stuck) or (rank.fate.status.state == "votes" and not waits_alone):
            continue  # a rank that waits for the votes of others has done its part
        if not explained or any(report.failed for report in rank.phases.values()):
            found[rank.reached()].append(_standstill(context, rank.rank, rank.fate))


def _standstill(context: Context, rank: int, stuck: Stuck) -> Problem:
    outcome, status = context.outcome, stuck.status
    if stuck.importing:
        file = _relative(context, stuck.importing)
        end = f"did not finish importing {file} within {outcome.seconds:.0f} s"
    elif outcome.timed_out:
        end = f"timed out after {outcome.timeout:g} s"
    else:
        end = f"killed by the harness after {outcome.seconds:.1f} s"
    title = f"{end}, in {place_of(status)}"
    blamed = context.diagnosis is not None and rank in context.diagnosis.blame
    crash = _crash(context, status.where, title)
    return Problem(rank, 0.0 if blamed else stuck.at, title, None, status.stacks, stuck.output, crash)


def _relative(context: Context, path: str) -> str:
    return path.removeprefix(f"{context.item.config.invocation_params.dir}/")


def _add_silence(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """Fail a rank that reached the end of an item and sent no report of a phase."""
    config = context.item.config
    calls = not (config.getoption("setuponly", False) or config.getoption("setupplan", False))
    for rank in ranks:
        setup = rank.phases.get("setup")
        if not isinstance(rank.fate, Finished) or any(report.failed for report in rank.phases.values()):
            continue
        due: list[Phase] = ["setup", "teardown"]
        if calls and setup is not None and setup.passed:
            due.append("call")
        for phase in due:
            if phase not in rank.phases:
                title = f"sent no report of the {phase} phase; does a plugin run items itself?"
                found[phase].append(_wrong(context, rank.rank, title))


def subtest_problems(
    context: Context, ranks: list[RankReports], name: tuple[str, int], reports: dict[int, pytest.TestReport]
) -> list[Problem]:
    """Return the problems of one subtest, of which some ranks have a report."""
    failed = {rank: report for rank, report in reports.items() if report.failed}
    problems = [_failure(rank, report) for rank, report in failed.items()]
    if any(hasattr(report, "wasxfail") for report in reports.values()):
        return [problem for problem in problems if not problem.is_victim()]
    for rank in ranks:
        if problems and isinstance(rank.fate, Died) and name not in rank.subtests:
            problems.append(_death(context, rank.rank, rank.fate))  # in this subtest, before its report
    return problems or _different_outcomes(context, ranks, reports)


def _different_outcomes(
    context: Context, ranks: list[RankReports], reports: dict[int, pytest.TestReport]
) -> list[Problem]:
    """Blame the ranks whose outcome of a subtest is not that of most."""
    outcomes = [report.outcome for report in reports.values()]
    most = max(outcomes, key=outcomes.count)
    problems = []
    for rank in ranks:
        report = reports.get(rank.rank)
        if not isinstance(rank.fate, Finished) or (report is not None and report.outcome == most):
            continue
        what = f"{report.outcome} it and others did not" if report else "did not reach it and others did"
        problems.append(_wrong(context, rank.rank, f"{what}: ranks disagree"))
    return problems


def _wrong(context: Context, rank: int, title: str, is_mismatch: bool = False) -> Problem:
    """Return a problem that no report of the rank shows, and that stands before all others."""
    return Problem(rank, 0.0, title, crash=_crash(context, "", title), is_mismatch=is_mismatch)


def _add_unnoticed_mismatch(
    context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]
) -> None:
    """Fail a test in which ranks called a collective differently and all went on, with wrong numbers."""
    passed = all(report.passed for rank in ranks for report in rank.phases.values())
    if context.diagnosis is not None and passed:  # of a test that is expected to fail, it may be the reason
        rank = min(context.diagnosis.blame, default=0)
        title = "took part in a collective that ranks called differently"
        found["call"].append(_wrong(context, rank, title, is_mismatch=True))


def _add_out_of_step(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """Fail a test that leaves a collective, send or receive which others have not begun."""
    for rank in ranks:
        if rank.left_in_flight is not None:
            found["call"].append(_wrong(context, rank.rank, f"left {rank.left_in_flight}"))


def _add_disagreement(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """Fail a test that only some ranks left by a skip, or by `pytest.xfail()` without a mark on the test."""
    if any(hasattr(report, SKIPS_ALL) for rank in ranks for report in rank.phases.values()):
        return
    marked = context.item.get_closest_marker("xfail") is not None
    ranks = [rank for rank in ranks if not rank.excused]  # a rank whose death is excused says nothing
    left = [(rank, way[0]) for rank in ranks if (way := rank.skip() or (not marked and rank.xfail_call()))]
    if len(left) in (0, len(ranks)) or any(not problem.is_victim() for problem in chain(*found.values())):
        return
    rank, phase = left[0]
    report = rank.phases[phase]
    path, lineno = report.longrepr[:2] if isinstance(report.longrepr, tuple) else report.location[:2]
    crash = ReprFileLocation(str(path), lineno or 0, "ranks disagree")
    title = f"{rank.word()} and others did not: ranks disagree"
    found[phase].append(Problem(rank.rank, 0.0, title, crash=crash))


def _is_expected_failure(ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> bool:
    """Whether a rank failed as the test's xfail mark says, and no rank failed otherwise."""
    expected = any(
        report.skipped and hasattr(report, "wasxfail") for rank in ranks for report in rank.phases.values()
    )
    return expected and all(
        problem.is_victim()
        or (problem.report is not None and problem.report.longreprtext.startswith(STRICT_XPASS))
        for problem in chain(*found.values())
    )
