"""The text of a failure: pytest's own representation of the first cause, the other ranks, the re-run.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from harness.properties.messages import EXAMPLE, LEFT, VICTIM_OF_AN_EXAMPLE
from harness.protocol import BROKEN_CONNECTION, VICTIM_OF_A_CASE
from harness.reporting.problems import Problem
from harness.reporting.rank_reports import Context, Link, RankReports, lines, links, messages
from harness.world.outcome import Stuck


def explain(
    context: Context, causes: list[Problem], ranks: list[RankReports], reports: dict[int, pytest.TestReport]
) -> ExceptionChainRepr:
    """Compose the representation of a failed phase: head, first cause, other causes, the line to re-run."""
    first, *others = _group(causes)
    sentence = _diagnosis(context, first[0], ranks)
    head = [sentence] if sentence else []
    head += _head(first, len(ranks), others)
    in_groups = {problem.rank for group in (first, *others) for problem in group}
    cases = {rank.fate.status.case for rank in ranks if isinstance(rank.fate, Stuck)} - {""}
    if cases and not max(cases).startswith(EXAMPLE):
        head.append(f"subtests after [{max(cases)}] did not run")
    for rank in ranks:
        if rank.rank not in in_groups:
            peer = f"its connection to rank {first[0].rank}" if len(ranks) == 2 else "a connection"
            head.append(f"rank {rank.rank}: {_of_bystander(rank, reports.get(rank.rank), peer)}")
    longrepr = ExceptionChainRepr([(_native("\n".join(head)), None, None), *_chain(first[0], sentence)])
    for group in others:
        names = _names(group)
        longrepr.addsection(f"{names} {group[0].title}", _text(group[0]), "-")
    if context.example:
        longrepr.addsection("failing example", context.example, "-")
    longrepr.addsection(f"re-run (seed {context.seed})", context.rerun(), "-")
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


def _diagnosis(context: Context, first: Problem, ranks: list[RankReports]) -> str:
    """Say what was wrong between the ranks, unless what one of them did by itself tells what happened."""
    stuck = {rank.rank for rank in ranks if isinstance(rank.fate, Stuck)}
    told = first.rank in stuck or first.tells_mismatch or first.is_victim()
    return context.diagnosis.sentence if context.diagnosis is not None and told else ""


def _names(problems: list[Problem]) -> str:
    numbers = ", ".join(str(problem.rank) for problem in problems)
    return f"rank {numbers}" if len(problems) == 1 else f"ranks {numbers}"


def _of_bystander(rank: RankReports, report: pytest.TestReport | None, peer: str) -> str:
    """Say what became of a rank that is not to blame; `peer` names the connection that it may have lost."""
    reports = [each for each in (report, *rank.phases.values()) if each is not None]
    report = next((each for each in reports if each.failed), report)
    if report is not None and report.failed:
        message = messages(report)[-1]
        if VICTIM_OF_AN_EXAMPLE in message:
            return "stopped, as another rank had ended the test" if LEFT in message else "passed this example"
        if VICTIM_OF_A_CASE in message:
            return (
                "stopped, as another rank had ended the test" if LEFT in message else "did not fail this case"
            )
        if broken := BROKEN_CONNECTION.search(message):
            return f"lost {peer} at {lines(report)[0]} ({broken[1] or 'aborted'})"
        return f"failed at {lines(report)[0]} ({message.splitlines()[0]})"
    if report is not None and report is not rank.phases.get(report.when):
        return report.outcome  # of a subtest
    return rank.word()


def _chain(problem: Problem, sentence: str) -> list[Link]:
    report = problem.report
    chain: list[Link]
    if report is None:
        chain = [(_native(problem.told()), problem.crash, None)]
    elif not (chain := links(report)):
        location = ReprFileLocation(report.location[0], (report.location[1] or 0) + 1, messages(report)[-1])
        chain = [(_native(report.longreprtext), location, None)]
    for link, _, _ in chain:
        if link.extraline and link.extraline.startswith("All traceback entries are hidden"):
            link.extraline = None  # they are frames of this harness: no news
    entry, crash, description = chain[-1]
    if crash is None and report is not None:
        crash = ReprFileLocation(report.location[0], (report.location[1] or 0) + 1, messages(report)[-1])
    if crash is not None:
        message = sentence or f"rank {problem.rank}: {crash.message}"
        crash = ReprFileLocation(crash.path, crash.lineno, message)
    return [*chain[:-1], (entry, crash, description)]


def _native(text: str) -> ReprTraceback:
    lines = [text.rstrip("\n") + "\n"] if text else []
    return ReprTraceback([ReprEntryNative(lines)], None, style="native")


def _text(problem: Problem) -> str:
    return problem.told() if problem.report is None else problem.report.longreprtext
