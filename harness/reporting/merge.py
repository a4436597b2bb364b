"""Merging of the reports of N ranks into one: first cause first, equal tracebacks once, victims in a line.

Properties of the reports give CI systems the rank to blame, the cause and the command to re-run. Runs in the
controller; must not import torch.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest

from lockstep.output import truncate
from lockstep.protocol import OF_RANKS, REPORT_PARTS, RERUN_OPTIONS, TRIAL
from lockstep.reporting.explain import explain
from lockstep.reporting.problems import Problem, find_causes, find_problems, subtest_problems
from lockstep.reporting.pytest_internals import ExceptionChainRepr, bin_xml_escape
from lockstep.reporting.rank_reports import PHASES, Context, Phase, RankReports
from lockstep.world.outcome import Died, ItemOutcome, Stuck

MAX_CAUSE = 500
"""Characters."""
_PLAIN = {
    *("$report_type", "nodeid", "location", "keywords", "when", "outcome", "longrepr"),
    *("start", "stop", "duration", "sections", "user_properties"),
}
"""Keys of pytest's serialised report where no plugin has added to it."""
HYPOTHESIS = "Hypothesis"
"""Title of the section that Hypothesis prints: mostly the same on all ranks, and then shown once."""
Property = tuple[str, object]


def merge(
    outcome: ItemOutcome, item: pytest.Item, rerun: Callable[[], str], seed: int
) -> list[pytest.TestReport]:
    """Return the reports of an item for pytest: set-up, subtests, call, tear-down.

    Args:
        rerun: returns the command that runs the item again; called for failures only.
    """
    if outcome.has_passed() and (merged := _merge_plain(item.config, outcome)):
        return merged
    options = _rerun_options(outcome.last_run or outcome)
    ranks = [RankReports.read(item.config, rank) for rank in outcome.ranks]

    def rerun_subtests(*subtests: str) -> str:
        return rerun() + options + "".join(f" --subtest {shlex.quote(name)}" for name in subtests)

    # The re-run is restricted to the case that a rank was stuck in, else to those that the user selected.
    selected = item.config.getoption("subtest") if uses_run_subtests(item) else []
    cases = {rank.case() for rank in ranks} - {""}
    rerun_all = partial(rerun_subtests, *(map(as_option, cases) if len(cases) == 1 else selected))
    of_trials = [found for case, found in outcome.diagnoses.items() if case.startswith(TRIAL)]
    diagnosis = outcome.diagnosis or next(reversed(of_trials), None)
    context = Context(item, outcome, rerun_all, seed, diagnosis)
    problems = find_problems(context, ranks)
    bad = next((phase for phase in PHASES if problems[phase]), None)
    merged = []
    for phase in PHASES:
        reports = {rank.rank: rank.phases[phase] for rank in ranks if phase in rank.phases}
        if phase == "call":
            if bad == "setup" or not (reports or problems[phase]):
                continue
            merged.extend(_merge_subtests(context, ranks, rerun_subtests))
        merged.append(_merge_phase(context, phase, reports, problems[phase], ranks))
    _fail_for_subtests(merged)
    _repeat_in_later_reports(merged)
    return merged


def _merge_plain(config: pytest.Config, outcome: ItemOutcome) -> list[pytest.TestReport]:
    """Return the first rank's reports of an item that all have passed, with the times of all.

    None of them where one has output, properties, or what a plugin has added: these are merged.
    """
    merged = []
    for reports in zip(*(rank.reports for rank in outcome.ranks), strict=True):
        if any(each["sections"] or each["user_properties"] or each.keys() - _PLAIN for each in reports):
            return []
        times = {
            "start": min(each["start"] for each in reports),
            "stop": max(each["stop"] for each in reports),
            "duration": max(each["duration"] for each in reports),
        }
        data = {**reports[0], **times}
        merged.append(config.hook.pytest_report_from_serializable(config=config, data=data))
    return merged


def _rerun_options(outcome: ItemOutcome) -> str:
    reports = (report for rank in outcome.ranks for report in rank.reports)
    return next((str(report[RERUN_OPTIONS]) for report in reports if RERUN_OPTIONS in report), "")


HAS_CASES = pytest.StashKey[bool]()
"""True in the stash of an item of which a feature makes cases, without the fixture `run_subtests`."""


def uses_run_subtests(item: pytest.Item) -> bool:
    """Return whether cases of an item can be selected."""
    return item.stash.get(HAS_CASES, False) or "run_subtests" in getattr(item, "fixturenames", ())


def as_option(case: str) -> str:
    """Return the name of a case as `--subtest` has it."""
    return case.replace(", ", ",")


def _merge_subtests(
    context: Context, ranks: list[RankReports], rerun: Callable[..., str]
) -> list[pytest.TestReport]:
    names = dict.fromkeys(name for rank in ranks for name in rank.subtests)
    merged = []
    for name in names:
        reports = {rank.rank: rank.subtests[name] for rank in ranks if name in rank.subtests}
        problems = subtest_problems(context, ranks, name, reports)
        case = reports[min(reports)].context.msg
        is_case = case and uses_run_subtests(context.item)
        rerun_case = partial(rerun, as_option(case)) if is_case else rerun
        diagnosis = context.outcome.diagnoses.get(case)
        of_case = replace(context, rerun=rerun_case, diagnosis=diagnosis, case=case or "")
        report = _merge_phase(of_case, "call", reports, problems, ranks)
        setattr(report, OF_RANKS, True)
        merged.append(report)
    return merged


def _fail_for_subtests(merged: list[pytest.TestReport]) -> None:
    """Fail the test for its failed subtests. pytest does it for those of its own process."""
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
    causes = sorted(find_causes(problems), key=lambda problem: problem.at)
    merged = _template(context, phase, reports, causes)
    if reports:
        merged.start = min(report.start for report in reports.values())
        merged.stop = max(report.stop for report in reports.values())
        merged.duration = max(report.duration for report in reports.values())
    printed = {rank.rank: sections for rank in ranks if (sections := _printed(rank, phase, reports))}
    merged.sections = _sections(context.item.config, printed, {problem.rank for problem in causes})
    merged.user_properties = _merge_properties(reports.values())
    if any(cause.report is None for cause in causes):  # died and killed ranks report no duration
        merged.duration = max(merged.duration, context.outcome.seconds)
    if causes:
        merged.outcome = "failed"
        merged.longrepr = shown = explain(context, causes, ranks, reports)
        merged.user_properties += _properties_of_failure(context, causes, shown)
    return merged


def _template(
    context: Context, phase: Phase, reports: dict[int, pytest.TestReport], causes: list[Problem]
) -> pytest.TestReport:
    """Choose the report that stands for all: the cause's, else one that says more than "passed"."""
    if causes:
        chosen = causes[0].report or next(iter(reports.values()), None)
        if chosen is not None and chosen.when == phase:
            chosen = copy.copy(chosen)
            vars(chosen).pop("wasxfail", None)
            if causes[0].report is None:
                vars(chosen).pop(REPORT_PARTS, None)  # of a victim
            return chosen
    else:
        # A report that failed without being a cause is a victim's: another report shows the cause.
        sound = [report for report in reports.values() if not report.failed]
        if sound:
            return copy.copy(min(sound, key=lambda report: (report.passed, not hasattr(report, "wasxfail"))))
    keywords: dict[str, Literal[1]] = dict.fromkeys(context.item.keywords, 1)
    return pytest.TestReport(context.item.nodeid, context.item.location, keywords, "passed", None, phase)


def _printed(rank: RankReports, phase: Phase, reports: dict[int, pytest.TestReport]) -> list[tuple[str, str]]:
    """Return the output of a rank up to the end of a phase; if it died or was killed, what is known of it."""
    if rank.rank in reports:
        return reports[rank.rank].sections
    if not isinstance(rank.fate, Died | Stuck) or PHASES.index(phase) < PHASES.index(rank.reached()):
        return []
    before = next((report.sections for report in reversed(rank.phases.values())), [])
    # The representation of a death shows the last output itself.
    captured = rank.fate.captured if isinstance(rank.fate, Stuck) else ()
    return [*before, *((f"Captured {stream} {rank.reached()}", text) for stream, text in captured)]


def _sections(
    config: pytest.Config, printed: dict[int, list[tuple[str, str]]], to_blame: set[int]
) -> list[tuple[str, str]]:
    shown = config.getoption("rank_output")
    if shown == "none":
        return []
    ranks = sorted(printed, key=lambda rank: (rank not in to_blame, rank))
    # pytest's XML report joins the texts and leaves out their titles.
    titled = config.getoption("xmlpath", None) and config.getini("junit_logging") != "no"
    wanted = [rank for rank in ranks if shown == "all" or not to_blame or rank in to_blame]
    return [
        (f"{title} (rank {rank})", f"rank {rank}:\n{text}" if titled else text)
        for rank in wanted
        for title, text in printed[rank]
        if rank == wanted[0] or title != HYPOTHESIS or (title, text) not in printed[wanted[0]]
    ]


def _properties_of_failure(
    context: Context, causes: list[Problem], shown: ExceptionChainRepr
) -> list[Property]:
    """Return `rank` (of those to blame), `cause` (a line) and `rerun` (a command) of a failure."""
    crash = shown.reprcrash
    message = "" if crash is None else crash.message.removeprefix(f"rank {causes[0].rank}: ")
    return [
        ("rank", ", ".join(map(str, sorted({cause.rank for cause in causes})))),
        ("cause", truncate(next(iter(message.splitlines()), causes[0].title), MAX_CAUSE)),
        ("rerun", context.rerun()),
    ]


def _merge_properties(reports: Iterable[pytest.TestReport]) -> list[Property]:
    """Return the properties that tests have recorded on any rank, equal pairs once."""
    found: list[Property] = []
    for report in reports:
        # pytest's XML escapes values, but not names.
        named = ((bin_xml_escape(name), value) for name, value in report.user_properties)
        found.extend(pair for pair in named if pair not in found)
    return found


def _repeat_in_later_reports(merged: list[pytest.TestReport]) -> None:
    """Repeat the properties of failures in the later reports of the item that passed.

    XML reports take the properties of a test from its last report.
    """
    of_failures: list[Property] = []
    for report in merged:
        if report.failed:
            of_failures.extend(pair for pair in report.user_properties if pair not in of_failures)
        else:
            report.user_properties.extend(pair for pair in of_failures if pair not in report.user_properties)
