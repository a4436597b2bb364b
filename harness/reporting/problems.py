"""What went wrong with an item: who is to blame, who is a victim, and in which phase it happened.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from _pytest._code.code import ReprFileLocation

from harness.properties.messages import VICTIM_OF_AN_EXAMPLE
from harness.protocol import BROKEN_CONNECTION, VICTIM_OF_A_CASE, Finished
from harness.reporting.rank_reports import PHASES, Context, Phase, RankReports, lines, messages, skip_location
from harness.tracebacks import user_line
from harness.world.diagnosis import place_of
from harness.world.outcome import Died, Stuck

_GLOO_GOT_TOO_MUCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_STRICT_XPASS = "[XPASS(strict)]"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one rank did not do its part of a phase."""

    rank: int
    at: float
    title: str
    """Follows "rank N": "failed", "died: SIGKILL", "waits in all_reduce #3 …"."""
    report: pytest.TestReport | None = None
    text: str = ""
    """What there is to show where there is no report: stacks."""
    output: str = ""
    """The rank's last output, where there is no report."""
    crash: ReprFileLocation | None = None
    tells_mismatch: bool = False
    """Whether it is about what was wrong between the ranks, which the diagnosis says."""

    def is_victim(self) -> bool:
        """Whether the rank only noticed what happened to another."""
        if self.report is None:
            return False
        return any(
            VICTIM_OF_A_CASE in message
            or VICTIM_OF_AN_EXAMPLE in message
            or BROKEN_CONNECTION.search(message)
            for message in messages(self.report)
        )

    def is_bystander(self) -> bool:
        """Whether the rank has only been told by others that an example has failed."""
        return self.report is not None and any(
            VICTIM_OF_AN_EXAMPLE in message for message in messages(self.report)
        )

    def told(self) -> str:
        """What is shown where there is no report."""
        last = f"rank {self.rank}'s last output:\n{self.output}" if self.output else ""
        return "\n".join(filter(None, (self.text, last)))

    def key(self) -> object:
        """What is equal for problems that need to be shown once only."""
        if self.report is None:
            return self.title, self.text, self.output
        said = re.sub(r"0x[0-9a-f]+", "0x", "\n".join(messages(self.report)))
        return said, lines(self.report)


def find_causes(problems: list[Problem]) -> list[Problem]:
    """Return those that are no victims; where all are, those that tell more than that another has failed."""
    causes = [problem for problem in problems if not problem.is_victim()]
    return causes or [problem for problem in problems if not problem.is_bystander()] or problems


def find_problems(context: Context, ranks: list[RankReports]) -> dict[Phase, list[Problem]]:
    """Sort what went wrong into phases: set-up and call together where it first happened, tear-down apart."""
    found: dict[Phase, list[Problem]] = {phase: [] for phase in PHASES}
    for rank in ranks:
        for phase in PHASES:
            report = rank.phases.get(phase)
            if report is not None and report.failed:
                found[phase].append(Problem(rank.rank, report.stop, "failed", report))
        if isinstance(rank.fate, Died):
            found[rank.reached()].append(death_of(context, rank.rank, rank.fate))
    _add_silence(context, ranks, found)
    _add_disagreement(context, ranks, found)
    _add_stuck(context, ranks, found)
    if not any(_all(found)):
        _add_unnoticed_mismatch(context, ranks, found)
    if not any(_all(found)):
        _add_out_of_step(context, ranks, found)
    if _is_expected_failure(ranks, found):
        return {phase: [] for phase in PHASES}
    first = next((phase for phase in PHASES[:2] if found[phase]), None)
    if first is not None:
        causes = sorted(found["setup"] + found["call"], key=lambda problem: problem.at)
        found["setup"], found["call"] = [], []
        found[first] = causes
        # What breaks in tear-down after that because a peer is gone is no news.
        found["teardown"] = [problem for problem in found["teardown"] if not problem.is_victim()]
    return found


def _all(found: dict[Phase, list[Problem]]) -> Iterable[Problem]:
    return (problem for problems in found.values() for problem in problems)


def death_of(context: Context, rank: int, died: Died) -> Problem:
    why = died.how + _meaning_of_gloos_words(died.output)
    base = str(context.config.invocation_params.dir)
    if died.importing:
        why += f" while importing {_name_of(context, died.importing)}"
    where = user_line(died.output, base)
    title = f"{why}, at {where}" if where else why
    return Problem(rank, died.at, title, output=died.output, crash=_crash(context, where, why))


def _meaning_of_gloos_words(output: str) -> str:
    """Explain the check by which gloo aborts a process that is sent more than it has room for."""
    if match := _GLOO_GOT_TOO_MUCH.search(output):
        got, room = match.groups()
        return f" (gloo received {got} bytes where it expected {room}: shapes or dtypes differ between ranks)"
    return ""


def _crash(context: Context, where: str, message: str) -> ReprFileLocation:
    """Point to a `file:line in function`, or to the test where that is not known."""
    if match := re.match(r"(.*):(\d+) in ", where):
        return ReprFileLocation(match[1], int(match[2]), message)
    path, lineno, _ = context.item.location
    return ReprFileLocation(path, (lineno or 0) + 1, message)


def _add_stuck(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """A rank that was ended while it ran is to blame if nothing else explains it, or if it failed before."""
    explained = any(not problem.is_victim() for problem in _all(found))
    stuck = [rank.fate for rank in ranks if isinstance(rank.fate, Stuck)]
    waits_alone = all(fate.status.state == "votes" for fate in stuck)
    for rank in ranks:
        if isinstance(rank.fate, Stuck) and rank.fate.status.state == "votes" and not waits_alone:
            continue  # it has done its part
        failed_before = any(report.failed for report in rank.phases.values())
        if isinstance(rank.fate, Stuck) and (failed_before or not explained):
            title = f"{_when_ended(context, rank.fate)}, in {place_of(rank.fate.status)}"
            found[rank.reached()].append(_of_stuck(context, rank.rank, rank.fate, title))


def _when_ended(context: Context, stuck: Stuck) -> str:
    if stuck.importing:
        return f"did not finish importing {_name_of(context, stuck.importing)} within {context.seconds:.0f} s"
    if context.timed_out:
        return f"timed out after {context.timeout:g} s"
    return f"killed by the harness after {context.seconds:.1f} s"


def _name_of(context: Context, path: str) -> str:
    return path.removeprefix(f"{context.config.invocation_params.dir}/")


def _add_silence(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """A rank that reached the end of an item must have said how each phase went: silence is no success."""
    calls = not (context.config.getoption("setuponly", False) or context.config.getoption("setupplan", False))
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
                found[phase].append(Problem(rank.rank, 0.0, title, crash=_crash(context, "", title)))


def subtest_problems(
    context: Context, ranks: list[RankReports], name: tuple[str, int], reports: dict[int, pytest.TestReport]
) -> list[Problem]:
    """Return what went wrong with one subtest, of which some ranks have a report."""
    failed = {rank: report for rank, report in reports.items() if report.failed}
    problems = [Problem(rank, report.stop, "failed", report) for rank, report in failed.items()]
    if any(hasattr(report, "wasxfail") for report in reports.values()):
        return [problem for problem in problems if not problem.is_victim()]
    for rank in ranks:
        if problems and isinstance(rank.fate, Died) and name not in rank.subtests:
            problems.append(death_of(context, rank.rank, rank.fate))  # it died in it, without a word
    if not problems:
        outcomes = [report.outcome for report in reports.values()]
        most = max(outcomes, key=outcomes.count)
        for rank in ranks:
            report = reports.get(rank.rank)
            way = (
                "did not reach it and others did"
                if report is None
                else f"{report.outcome} it and others did not"
            )
            if isinstance(rank.fate, Finished) and (report is None or report.outcome != most):
                title = f"{way}: ranks disagree"
                problems.append(Problem(rank.rank, 0.0, title, crash=_crash(context, "", title)))
    return problems


def _add_unnoticed_mismatch(
    context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]
) -> None:
    """Ranks may call a collective differently and all go on, with wrong numbers."""
    passed = all(report.passed for rank in ranks for report in rank.phases.values())
    if context.diagnosis is not None and passed:  # of a test that is expected to fail, it may be the reason
        rank = min(context.diagnosis.blame, default=0)
        title = "took part in a collective that ranks called differently"
        crash = _crash(context, "", title)
        found["call"].append(Problem(rank, 0.0, title, crash=crash, tells_mismatch=True))


def _add_out_of_step(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """A collective that not all ranks have begun when the test is over is a failure, though nobody waited."""
    for rank in ranks:
        if rank.left_in_flight is not None:
            title = f"left {rank.left_in_flight} in flight: not every rank has joined it"
            found["call"].append(Problem(rank.rank, 0.0, title, crash=_crash(context, "", title)))


def _of_stuck(context: Context, rank: int, stuck: Stuck, title: str) -> Problem:
    crash = _crash(context, stuck.status.where, title)
    blamed = context.diagnosis is not None and rank in context.diagnosis.blame
    at = 0.0 if blamed else stuck.at
    return Problem(rank, at, title, text=stuck.status.stacks, output=stuck.output, crash=crash)


def _add_disagreement(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """Ranks must leave a test together: by a skip, or by `pytest.xfail()` where no mark covers them all."""
    marked = context.item.get_closest_marker("xfail") is not None
    left = [(rank, way[0]) for rank in ranks if (way := rank.skip() or (not marked and rank.xfail_call()))]
    if len(left) in (0, len(ranks)) or any(not problem.is_victim() for problem in _all(found)):
        return
    rank, phase = left[0]
    crash = ReprFileLocation(*skip_location(rank.phases[phase]), "ranks disagree")
    title = f"{rank.word()} and others did not: ranks disagree"
    found[phase].append(Problem(rank.rank, 0.0, title, crash=crash))


def _is_expected_failure(ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> bool:
    """Whether a rank failed as the test's xfail mark says, and no rank failed otherwise."""
    expected = any(
        report.skipped and hasattr(report, "wasxfail") for rank in ranks for report in rank.phases.values()
    )
    return expected and all(
        problem.is_victim()
        or (problem.report is not None and problem.report.longreprtext.startswith(_STRICT_XPASS))
        for problem in _all(found)
    )
