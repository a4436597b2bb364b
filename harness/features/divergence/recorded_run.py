"""The second run of a test in which two runs, or ranks, differ: with recording, to say where they part first.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.backends import BROKEN_CONNECTION
from lockstep.exceptions import WorldError
from lockstep.features.compiles import FEATURE as COMPILED
from lockstep.features.compiles import FINDINGS
from lockstep.features.divergence import FEATURE
from lockstep.protocol import REPORT_PARTS, RunItem
from lockstep.reporting.merge import as_option, uses_run_subtests
from lockstep.reporting.pytest_internals import crash_message
from lockstep.world.outcome import ItemOutcome

_PASSED = (
    "the test ran again, with recording, and passed: the divergence does not come every time. A collective "
    "that is not waited for, uninitialised memory, or a random number that no seed fixes is like that"
)
_AGREES_UNCOMPILED = (
    "the test ran again, with recording, for which torch runs all code uncompiled, and passed.\neager agrees"
)
_IN_COMPILED_CODE = "the difference comes with"
_NOT_COMPARED = f"{_IN_COMPILED_CODE} torch.compile; in which module is not known: a third run, compiled, "
_PARTS_UNCOMPILED = (
    "torch ran all code of the recorded run uncompiled, as modules cannot be seen inside a graph: the "
    "difference above comes without torch.compile, too"
)
_OTHERWISE = (
    "the test ran again, with recording, and did not come to this assertion: it failed in another way"
)
_LATE = "the test ran again, with recording, and did not end before its deadline: --world-timeout raises it"


def diverged_case(outcome: ItemOutcome) -> str | None:
    """Return the first case in which runs or ranks differ, "" for the test itself; None if there is none."""
    cases = (_case_of(report) for rank in outcome.ranks for report in rank.reports)
    return next((case for case in cases if case is not None), None)


def _case_of(report: dict[str, Any]) -> str | None:
    case: str | None = report.get(REPORT_PARTS, {}).get(FEATURE)
    return case


def run_recorded(
    item: pytest.Item,
    order: RunItem,
    outcome: ItemOutcome,
    case: str,
    run: Callable[[RunItem], ItemOutcome],
) -> ItemOutcome:
    """Return the outcome with the explanations of a recorded run, or with a note that it has none."""
    try:
        recorded = run(_order_of_case(order, item, case, FEATURE))
    except (WorldError, pytest.fail.Exception) as error:
        note = f"the test could not run again, with recording: {error}"
    else:
        note = _explain(outcome, recorded, case)
        if note == _AGREES_UNCOMPILED:
            note += look_at_graphs(_order_of_case(order, item, case, COMPILED), run)
    if note:
        outcome.parts[FEATURE] = {case: note}
    return outcome


def look_at_graphs(order: RunItem, run: Callable[[RunItem], ItemOutcome]) -> str:
    """Run the test a third time, in which ranks compare compiled graphs; return the end of the note."""
    from lockstep.features.compiles.finding import described

    try:
        outcome = run(order)
    except (WorldError, pytest.fail.Exception) as error:
        return f": {_NOT_COMPARED}could not start: {error}"
    if _passed(outcome):
        return ", and so did a third run, compiled: the difference does not come every time"
    if findings := outcome.parts.get(FINDINGS):
        return f": {_IN_COMPILED_CODE} {described(findings)}"
    return f": {_NOT_COMPARED}{'was too slow' if outcome.timed_out else 'compared no graph'}"


def _order_of_case(order: RunItem, item: pytest.Item, case: str, feature: str) -> RunItem:
    """Return the order that runs the test, or one case of it, again, for a feature."""
    subtests = (as_option(case),) if case and uses_run_subtests(item) else ()
    return replace(
        order,
        next_item=None,
        shared_tmp_path=order.shared_tmp_path and f"{order.shared_tmp_path}-{feature}",
        parts={**order.parts, feature: subtests},
    )


def _explain(outcome: ItemOutcome, recorded: ItemOutcome, case: str) -> str:
    """Replace reports by those of the recorded run; return a note if it has none."""
    again = {
        rank.rank: [report for report in rank.reports if _case_of(report) == case] for rank in recorded.ranks
    }
    compiled = any(COMPILED in rank.parts() for rank in outcome.ranks)
    if not any(again.values()):
        if recorded.timed_out:
            return _LATE
        if _passed(recorded):
            return _AGREES_UNCOMPILED if compiled else _PASSED
        return _OTHERWISE + _raised(recorded)
    for rank in outcome.ranks:
        new = iter(again.get(rank.rank, ()))
        rank.reports[:] = [
            next(new, report) if _case_of(report) == case else report for report in rank.reports
        ]
    return _PARTS_UNCOMPILED if compiled else ""


def _raised(outcome: ItemOutcome) -> str:
    """Return the first line of what a rank raised, behind a colon; empty if none raised anything."""
    said = [crash_message(report) for rank in outcome.ranks for report in rank.reports]
    said = [message.partition("\n")[0] for message in said if message]
    # Where one rank raises, others lose their connection to it.
    own = [message for message in said if not BROKEN_CONNECTION.search(message)]
    return "".join(f": {message}" for message in (own or said)[:1])


def _passed(outcome: ItemOutcome) -> bool:
    reports = [report for rank in outcome.ranks for report in rank.reports]
    is_over = len(outcome.finished()) == len(outcome.ranks)
    return is_over and not any(report["outcome"] == "failed" for report in reports)
