"""Text of a failure: pytest's own representation of the first cause, the other ranks, the re-run line.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import shlex

import pytest

from lockstep.backends import BROKEN_CONNECTION
from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_CASE, VICTIM_OF_A_TRIAL, Finished, Preparation
from lockstep.reporting.problems import Problem
from lockstep.reporting.pytest_internals import (
    ExceptionChainRepr,
    Link,
    ReprFileLocation,
    as_traceback,
    drop_note_of_hidden_frames,
    lines,
    links,
    location_of,
    messages,
)
from lockstep.reporting.rank_reports import Context, RankReports
from lockstep.world.diagnosis import named
from lockstep.world.outcome import Died, ItemOutcome, Stuck, in_preparation


def explain(
    context: Context, causes: list[Problem], ranks: list[RankReports], reports: dict[int, pytest.TestReport]
) -> ExceptionChainRepr:
    """Compose the representation of a failed phase: head, first cause, other causes, the line to re-run."""
    groups: list[list[Problem]] = []
    for cause in causes:
        alike = (group for group in groups if cause.keys() & group[0].keys())
        group = next(alike, None)
        if group is None:
            groups.append([cause])
        else:
            group.append(cause)
    first, *others = groups
    sentence = _diagnosis(context, first[0], ranks)
    before = context.outcome.preparation
    head = [in_preparation(before, len(ranks))] if before else []
    head += [sentence] if sentence else []
    head += _head(first, context.outcome, others)
    if cases := {rank.case() for rank in ranks} - {""}:
        head.append(f"subtests after [{max(cases)}] did not run")
    to_blame = {cause.rank for cause in causes}
    peer = f"its connection to rank {first[0].rank}" if len(ranks) == 2 else "a connection"
    for rank in ranks:
        if rank.rank not in to_blame:
            head.append(f"rank {rank.rank}: {_of_bystander(rank, reports.get(rank.rank), peer)}")
    head += _left_build_locks(ranks)
    hook = context.item.config.hook
    for remarks in hook.pytest_ranks_remarks(context=context):
        head += remarks
    longrepr = ExceptionChainRepr(
        [(as_traceback("\n".join(head)), None, None), *_chain(first[0], sentence, before)]
    )
    for group in others:
        longrepr.addsection(f"{named(each.rank for each in group)} {group[0].title}", group[0].details(), "-")
    report = next(iter(reports.values()), None)
    for title, text in hook.pytest_ranks_sections(context=context, cause=first[0], report=report):
        longrepr.addsection(title, text, "-")
    longrepr.addsection(f"re-run (seed {context.seed})", context.rerun(), "-")
    return longrepr


def _head(first: list[Problem], outcome: ItemOutcome, others: list[list[Problem]]) -> list[str]:
    size = len(outcome.ranks)
    title = first[0].title + (" first" if others and first[0].title == "failed" else "")
    but = "" if len({problem.said() for problem in first}) == 1 else " but for the rank's own number"
    if len(first) == size and size > 1:
        shown = first[0].shown()
        same = f", with the same {shown}{but}; this is rank {first[0].rank}'s" if shown else ""
        return [f"all {size} ranks {title}{same}"]
    host = next(each.host for each in outcome.ranks if each.rank == first[0].rank)
    host = f" (host {host})" if host else ""
    head = [f"rank {first[0].rank} of {outcome.world}{host} {title}"]
    if len(first) > 1:
        head.append(f"{named(each.rank for each in first[1:])}: the same{but}")
    head.extend(f"{named(each.rank for each in group)}: {group[0].title}, see below" for group in others)
    return head


def _diagnosis(context: Context, first: Problem, ranks: list[RankReports]) -> str:
    """Say what was wrong between the ranks, unless the first cause explains the failure without it."""
    fate = next(rank.fate for rank in ranks if rank.rank == first.rank)
    if isinstance(fate, Died) and (gone := fate.host_gone):
        lost = [rank.rank for rank in ranks if isinstance(rank.fate, Died) and rank.fate.host_gone == gone]
        return f"host {gone} is gone: {named(lost)}"
    stuck = isinstance(fate, Stuck)
    needed = stuck or first.is_mismatch or first.is_victim()
    if not needed:
        return ""
    return context.diagnosis.sentence if context.diagnosis is not None else _early_end_of_a_group(ranks)


def _early_end_of_a_group(ranks: list[RankReports]) -> str:
    """Say that gloo could not connect a rank to a group that another had made, and ended, by then."""
    failed = {rank.rank: [report for report in rank.phases.values() if report.failed] for rank in ranks}
    connecting = [rank for rank, reports in failed.items() if any(map(_was_connecting, reports))]
    passed = [rank.rank for rank in ranks if isinstance(rank.fate, Finished) and not failed[rank.rank]]
    if not connecting or not passed:
        return ""
    what = f"rank {passed[0]} ended a process group to which rank {connecting[0]} was still connecting"
    return f"{what}: ranks need a barrier between making a group and destroying it"


def _was_connecting(report: pytest.TestReport) -> bool:
    return any("connectFullMesh" in message for message in messages(report))


def _left_build_locks(ranks: list[RankReports]) -> list[str]:
    """Name the locks of torch's C++ builds that stay behind as their ranks are killed, or that were there."""
    stuck = [(rank.rank, rank.fate) for rank in ranks if isinstance(rank.fate, Stuck)]
    locks = [(rank, lock) for rank, fate in stuck for lock in fate.status.build_locks]
    held = {lock.path for _, lock in locks if lock.is_held}
    lines = []
    for rank, lock in locks:
        remedy = f"remove it: rm {shlex.quote(lock.path)}"
        if lock.is_held:
            left = f"rank {rank} was building a C++ extension, and torch's lock {lock.path} stays"
            lines.append(f"{left}: every later build there waits for it; {remedy}")
        elif lock.path not in held:
            held.add(lock.path)
            waits = f"rank {rank} waits for torch's lock {lock.path}, which no rank of this test holds"
            lines.append(f"{waits}: unless another process is building now, {remedy}")
    return lines


def _of_bystander(rank: RankReports, report: pytest.TestReport | None, peer: str) -> str:
    """Say how the item went on a rank that is no cause; `peer` names the connection that it may have lost."""
    reports = [each for each in (report, *rank.phases.values()) if each is not None]
    report = next((each for each in reports if each.failed), report)
    if report is None or (not report.failed and report is rank.phases.get(report.when)):
        return rank.word()
    if not report.failed:
        return report.outcome  # of a subtest
    message = messages(report)[-1]
    if HAS_ENDED in message and (VICTIM_OF_A_TRIAL in message or VICTIM_OF_A_CASE in message):
        return "stopped, as another rank had ended the test"
    if VICTIM_OF_A_TRIAL in message:
        return "passed this example"
    if VICTIM_OF_A_CASE in message:
        return "did not fail this case"
    if broken := BROKEN_CONNECTION.search(message):
        return f"lost {peer} at {lines(report)[0]} ({next(filter(None, broken.groups()), 'aborted')})"
    return f"failed at {lines(report)[0]} ({message.splitlines()[0]})"


def _chain(problem: Problem, sentence: str, preparation: Preparation | None) -> list[Link]:
    """Return the exceptions of a problem, the last of which points to `sentence` or to its own message.

    Args:
        preparation: what it came up in, if not in the item itself.
    """
    report = problem.report
    if report is None:
        chain: list[Link] = [(as_traceback(problem.details()), problem.crash, None)]
    else:
        chain = links(report) or [(as_traceback(report.longreprtext), None, None)]
    for link in chain:
        drop_note_of_hidden_frames(link)
    entry, crash, description = chain[-1]
    if crash is None and report is not None:
        crash = location_of(report, messages(report)[-1])
    if crash is not None:
        message = sentence or f"rank {problem.rank}: {crash.message}"
        where = f"{preparation}: " if preparation else ""
        crash = ReprFileLocation(crash.path, crash.lineno, where + message)
    return [*chain[:-1], (entry, crash, description)]
