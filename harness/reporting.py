"""N reports become one: the first cause first, equal tracebacks once, victims in a line, the line that re-runs.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from harness.protocol import VICTIM_OF_A_POINT, Finished
from harness.world import Died, ItemOutcome, RankOutcome, Stuck

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")

# What a rank says when another one broke off: never the cause, if there is another.
_BROKEN_CONNECTION = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused)"
    r"|NCCL.*(aborted|remote process exited|socket)",
    re.DOTALL | re.IGNORECASE,
)
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
    """What there is to show where there is no report: stacks, last output."""
    crash: ReprFileLocation | None = None

    def is_victim(self) -> bool:
        """Whether the rank only noticed what happened to another."""
        if self.report is None:
            return False
        return any(
            VICTIM_OF_A_POINT in message or _BROKEN_CONNECTION.search(message) for message in _messages(self.report)
        )

    def key(self) -> object:
        """What is equal for problems that need to be shown once only."""
        if self.report is None:
            return self.title, self.text
        messages = re.sub(r"0x[0-9a-f]+", "0x", "\n".join(_messages(self.report)))
        return messages, _lines(self.report)


@dataclass(slots=True)
class RankReports:
    """One rank's reports of an item, by phase, and what it did not report itself."""

    rank: int
    phases: dict[str, pytest.TestReport] = field(default_factory=dict)
    subtests: dict[str, pytest.TestReport] = field(default_factory=dict)
    fate: Finished | Died | Stuck | None = None
    left_in_flight: str | None = None

    def reached(self) -> Phase:
        """The phase in which the rank ended without a word."""
        return next((phase for phase in PHASES if phase not in self.phases), "teardown")

    def skip(self) -> tuple[Phase, str] | None:
        """The phase and reason of the rank's skip, if it skipped."""
        for phase in PHASES[:2]:
            report = self.phases.get(phase)
            if report is not None and report.skipped and not hasattr(report, "wasxfail"):
                return phase, _skip_reason(report)
        return None

    def word(self) -> str:
        """What this rank says of the whole item, in a few words."""
        if isinstance(self.fate, Died):
            return self.fate.how
        if isinstance(self.fate, Stuck):
            return f"was in {_where(self.fate)}"
        if skip := self.skip():
            return f"skipped ({skip[1]})"
        failed = [phase for phase, report in self.phases.items() if report.failed]
        return f"failed in {failed[0]}" if failed else "passed"


@dataclass(frozen=True, slots=True)
class Context:
    """What the merging of an item needs to know beside the reports."""

    config: pytest.Config
    item: pytest.Item
    timeout: float
    timed_out: bool
    rerun: str
    """The command that runs this item again."""
    seed: int


def merge(outcome: ItemOutcome, item: pytest.Item, rerun: str, seed: int) -> list[pytest.TestReport]:
    """Return what pytest is told of the item: set-up, subtests, call, tear-down, one report each."""
    context = Context(item.config, item, outcome.timeout, outcome.timed_out, rerun, seed)
    ranks = [_read(context.config, rank) for rank in outcome.ranks]
    problems = _problems(context, ranks)
    bad = next((phase for phase in PHASES if problems[phase]), None)
    merged = []
    for phase in PHASES:
        reports = {rank.rank: rank.phases[phase] for rank in ranks if phase in rank.phases}
        if phase == "call":
            if bad == "setup" or not (reports or problems[phase]):
                continue
            merged.extend(_merge_subtests(context, ranks))
        merged.append(_merge_phase(context, phase, reports, problems[phase], ranks))
    _fail_for_subtests(merged)
    return merged


def _read(config: pytest.Config, outcome: RankOutcome) -> RankReports:
    ranks = RankReports(outcome.rank, fate=outcome.fate, left_in_flight=outcome.left_in_flight)
    for data in outcome.reports:
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        if type(report) is pytest.TestReport:
            ranks.phases[report.when or "call"] = report
        else:
            known = ranks.subtests.get(report.head_line)
            if known is None or not known.failed:
                ranks.subtests[report.head_line] = report
    return ranks


# Finding what went wrong


def _problems(context: Context, ranks: list[RankReports]) -> dict[Phase, list[Problem]]:
    """Sort what went wrong into phases: set-up and call together where it first happened, tear-down apart."""
    found: dict[Phase, list[Problem]] = {phase: [] for phase in PHASES}
    for rank in ranks:
        for phase in PHASES:
            report = rank.phases.get(phase)
            if report is not None and report.failed:
                found[phase].append(Problem(rank.rank, report.stop, "failed", report))
        if isinstance(rank.fate, Died):
            found[rank.reached()].append(_of_death(context, rank.rank, rank.fate))
    _add_disagreement(ranks, found)
    if not any(not problem.is_victim() for problem in _all(found)):
        _add_stuck(context, ranks, found)
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


def _of_death(context: Context, rank: int, died: Died) -> Problem:
    path, lineno, _ = context.item.location
    crash = ReprFileLocation(path, (lineno or 0) + 1, died.how)
    text = f"its last output:\n{died.output}" if died.output else ""
    return Problem(rank, died.at, died.how, text=text, crash=crash)


def _add_stuck(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """A rank that was ended while it ran is to blame only if nothing else explains it."""
    ended = [str(rank.rank) for rank in ranks if isinstance(rank.fate, Finished)]
    for rank in ranks:
        if isinstance(rank.fate, Stuck):
            if context.timed_out or not ended:
                title = f"still ran at the deadline of {context.timeout:g} s, in {_where(rank.fate)}"
            else:
                names = ", ".join(ended)
                title = f"waits in {_where(rank.fate)} for rank {names}, which has ended the test"
            found[rank.reached()].append(_of_stuck(context, rank.rank, rank.fate, title))


def _add_out_of_step(context: Context, ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    """A collective that not all ranks have begun when the test is over makes it fail, though nobody waited."""
    path, lineno, _ = context.item.location
    for rank in ranks:
        if rank.left_in_flight is not None:
            title = f"left {rank.left_in_flight} in flight, which not every rank has joined"
            crash = ReprFileLocation(path, (lineno or 0) + 1, title)
            found["call"].append(Problem(rank.rank, 0.0, title, crash=crash))


def _of_stuck(context: Context, rank: int, stuck: Stuck, title: str) -> Problem:
    match = re.match(r"(.*):(\d+) in ", stuck.doing.where)
    path, lineno, _ = context.item.location
    crash = ReprFileLocation(match[1], int(match[2]), title) if match else ReprFileLocation(path, lineno or 0, title)
    return Problem(rank, stuck.at, title, text=stuck.doing.stacks, crash=crash)


def _where(stuck: Stuck) -> str:
    where = stuck.doing.where
    return f"{stuck.doing.collective} at {where}" if stuck.doing.collective else where


def _add_disagreement(ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> None:
    skips = [(rank, skip) for rank in ranks if (skip := rank.skip())]
    others = [rank for rank in ranks if not rank.skip()]
    if not skips or not others or any(not problem.is_victim() for problem in _all(found)):
        return
    rank, (phase, _) = skips[0]
    crash = ReprFileLocation(*_skip_location(rank.phases[phase]), "ranks disagree")
    title = f"{rank.word()} and others did not: ranks disagree"
    found[phase].append(Problem(rank.rank, 0.0, title, crash=crash))


def _is_expected_failure(ranks: list[RankReports], found: dict[Phase, list[Problem]]) -> bool:
    """Whether a rank failed as the test's xfail mark says, and no rank failed otherwise."""
    expected = any(
        report.skipped and hasattr(report, "wasxfail") for rank in ranks for report in rank.phases.values()
    )
    return expected and all(
        problem.is_victim() or (problem.report is not None and problem.report.longreprtext.startswith(_STRICT_XPASS))
        for problem in _all(found)
    )


# Merging one phase


def _merge_subtests(context: Context, ranks: list[RankReports]) -> list[pytest.TestReport]:
    names = dict.fromkeys(name for rank in ranks for name in rank.subtests)
    merged = []
    for name in names:
        reports = {rank.rank: rank.subtests[name] for rank in ranks if name in rank.subtests}
        problems = [Problem(rank, report.stop, "failed", report) for rank, report in reports.items() if report.failed]
        if problems:  # a rank that died without a word on the point died in it
            dead = [rank for rank in ranks if isinstance(rank.fate, Died) and name not in rank.subtests]
            problems += [_of_death(context, rank.rank, rank.fate) for rank in dead if isinstance(rank.fate, Died)]
        point = reports[min(reports)].context.msg  # type: ignore[attr-defined]
        rerun = context.rerun
        if point and "=" in point:  # a point of run_subtests, which the command line can select
            rerun += f" --subtest {shlex.quote(point.replace(', ', ','))}"
        merged.append(_merge_phase(replace(context, rerun=rerun), "call", reports, problems, ranks))
    return merged


def _fail_for_subtests(merged: list[pytest.TestReport]) -> None:
    """Let a failed subtest fail the test, as pytest does; it counts those of its own process only."""
    failed = sum(report.failed and type(report) is not pytest.TestReport for report in merged)
    for report in merged:
        if failed and report.when == "call" and type(report) is pytest.TestReport and report.passed:
            report.outcome = "failed"
            report.longrepr = f"contains {failed} failed subtest{'s' if failed > 1 else ''}"


def _merge_phase(
    context: Context,
    phase: Phase,
    reports: dict[int, pytest.TestReport],
    problems: list[Problem],
    ranks: list[RankReports],
) -> pytest.TestReport:
    causes = [problem for problem in problems if not problem.is_victim()] or problems
    causes.sort(key=lambda problem: problem.at)
    merged = _template(context, phase, reports, causes)
    if reports:
        merged.start = min(report.start for report in reports.values())
        merged.stop = max(report.stop for report in reports.values())
        merged.duration = max(report.duration for report in reports.values())
    merged.sections = _sections(context, reports, {problem.rank for problem in causes})
    merged.user_properties = _unique(prop for report in reports.values() for prop in report.user_properties)
    if causes:
        merged.outcome = "failed"
        merged.longrepr = _explain(context, causes, ranks, reports)
    return merged


def _template(
    context: Context, phase: Phase, reports: dict[int, pytest.TestReport], causes: list[Problem]
) -> pytest.TestReport:
    """Choose the report that stands for all: the cause's, else one that tells more than "passed"."""
    if causes:
        chosen = causes[0].report or next(iter(reports.values()), None)
        if chosen is not None and chosen.when == phase:
            chosen = copy.copy(chosen)
            vars(chosen).pop("wasxfail", None)
            return chosen
    else:
        # A report that failed without being a cause is a victim's: the cause is told elsewhere.
        sound = [report for report in reports.values() if not report.failed]
        if sound:
            return copy.copy(min(sound, key=lambda report: (report.passed, not hasattr(report, "wasxfail"))))
    keywords = dict.fromkeys(context.item.keywords, 1)
    return pytest.TestReport(context.item.nodeid, context.item.location, keywords, "passed", None, phase)


def _sections(
    context: Context, reports: dict[int, pytest.TestReport], to_blame: set[int]
) -> list[tuple[str, str]]:
    shown = context.config.getoption("rank_output")
    if shown == "none":
        return []
    ranks = sorted(reports, key=lambda rank: (rank not in to_blame, rank))
    return [
        (f"{title} (rank {rank})", text)
        for rank in ranks
        if shown == "all" or not to_blame or rank in to_blame
        for title, text in reports[rank].sections
    ]


def _unique(values: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


# Telling of a failure


def _explain(
    context: Context, causes: list[Problem], ranks: list[RankReports], reports: dict[int, pytest.TestReport]
) -> ExceptionChainRepr:
    """Compose pytest's own representation of the first cause with our head, the other ranks and the re-run."""
    first, *others = _group(causes)
    head = _head(first, len(ranks), others)
    in_groups = {problem.rank for group in (first, *others) for problem in group}
    for rank in ranks:
        if rank.rank not in in_groups:
            head.append(f"rank {rank.rank}: {_of_bystander(rank, reports.get(rank.rank))}")
    entry = ReprTraceback([ReprEntryNative([line + "\n" for line in head])], None, style="native")
    longrepr = ExceptionChainRepr([(entry, None, None), *_chain(first[0])])
    for group in others:
        names = _names(group)
        longrepr.addsection(f"{names} {group[0].title}", _text(group[0]), "-")
    longrepr.addsection("re-run (seed %d)" % context.seed, context.rerun, "-")
    return longrepr


def _group(problems: list[Problem]) -> list[list[Problem]]:
    groups: dict[object, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.key(), []).append(problem)
    return list(groups.values())


def _head(first: list[Problem], size: int, others: list[list[Problem]]) -> list[str]:
    title = first[0].title + (" first" if others and first[0].title == "failed" else "")
    if len(first) == size and size > 1:
        return [f"all {size} ranks {title}, with the same traceback; this is rank {first[0].rank}'s"]
    head = [f"rank {first[0].rank} of {size} {title}"]
    if len(first) > 1:
        head.append(f"{_names(first[1:])}: the same")
    head.extend(f"{_names(group)}: {group[0].title}, see below" for group in others)
    return head


def _names(problems: list[Problem]) -> str:
    numbers = ", ".join(str(problem.rank) for problem in problems)
    return f"rank {numbers}" if len(problems) == 1 else f"ranks {numbers}"


def _of_bystander(rank: RankReports, report: pytest.TestReport | None) -> str:
    if report is not None and report.failed:
        broken = _BROKEN_CONNECTION.search(_messages(report)[-1])
        why = broken[1] or "aborted" if broken else _messages(report)[-1].splitlines()[0]
        return f"cut off by that at {_lines(report)[0]} ({why})"
    if report is not None and report is not rank.phases.get(report.when or ""):
        return report.outcome  # of a subtest
    return rank.word()


def _chain(problem: Problem) -> list[tuple[ReprTraceback, ReprFileLocation | None, str | None]]:
    report = problem.report
    if report is None:
        lines = [problem.text.rstrip("\n") + "\n"] if problem.text else []
        chain = [(ReprTraceback([ReprEntryNative(lines)], None, style="native"), problem.crash, None)]
    elif isinstance(report.longrepr, ExceptionChainRepr):
        chain = list(report.longrepr.chain)
    else:
        location = ReprFileLocation(report.location[0], (report.location[1] or 0) + 1, _messages(report)[-1])
        lines = [report.longreprtext.rstrip("\n") + "\n"]
        chain = [(ReprTraceback([ReprEntryNative(lines)], None, style="native"), location, None)]
    entry, crash, description = chain[-1]
    if crash is not None:
        crash = ReprFileLocation(crash.path, crash.lineno, f"rank {problem.rank}: {crash.message}")
    return [*chain[:-1], (entry, crash, description)]


def _text(problem: Problem) -> str:
    return problem.text if problem.report is None else problem.report.longreprtext


def _messages(report: pytest.TestReport) -> list[str]:
    """Return the message of every exception of the report's chain, the one that ended the phase last."""
    longrepr = report.longrepr
    if isinstance(longrepr, ExceptionChainRepr):
        messages = [crash.message for _, crash, _ in longrepr.chain if crash is not None]
        if messages:
            return messages
    return [report.longreprtext or "(no message)"]


def _lines(report: pytest.TestReport) -> tuple[str, ...]:
    """Return the lines that the traceback goes through, the test's own first."""
    if not isinstance(report.longrepr, ExceptionChainRepr):
        return (f"{report.location[0]}:{(report.location[1] or 0) + 1}",)
    places = (getattr(entry, "reprfileloc", None) for entry in report.longrepr.reprtraceback.reprentries)
    return tuple(f"{place.path}:{place.lineno}" for place in places if place is not None) or (report.nodeid,)


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _skip_location(report: pytest.TestReport) -> tuple[str, int]:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[0]), report.longrepr[1]
    return report.location[0], report.location[1] or 0
