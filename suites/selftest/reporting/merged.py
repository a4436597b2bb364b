"""Ranks of one item whose reports are merged, with some that died or hang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.protocol import Finished, RankStatus
from lockstep.reporting.merge import merge
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

LOST = "gloo: Connection closed by peer"


def made(when: str, outcome: Any, text: Any, **fields: Any) -> pytest.TestReport:
    """Return a report of a phase; a failure has `text` as its representation."""
    longrepr = ("a.py", 4, f"Skipped: {text}") if outcome == "skipped" and text else text
    times = {"start": 1.0, "stop": 2.0, "duration": 1.0} | fields
    return pytest.TestReport("a.py::test", ("a.py", 6, "test"), {}, outcome, longrepr, when, **times)  # type: ignore[arg-type]


@dataclass
class Ranks:
    """The ranks of an item, and their merged reports."""

    item: Any

    def rank(self, number: int, call: str = "passed", text: Any = None, **fields: Any) -> RankOutcome:
        """Return a rank that set up, called with this outcome, and tore down."""
        call_fields = fields.pop("call_fields", {})
        reports = [made("setup", "passed", None), made("call", call, text, **call_fields)]
        return self.of(number, [*reports, made("teardown", "passed", None)], **fields)

    def of(self, number: int, reports: list[pytest.TestReport], **fields: Any) -> RankOutcome:
        hook = self.item.config.hook
        sent = [
            hook.pytest_report_to_serializable(config=self.item.config, report=report) for report in reports
        ]
        given = {"fate": Finished(True, 0, 0), **fields}
        return RankOutcome(number, sent, **given)

    def merge(self, *ranks: RankOutcome, timed_out: bool = False, **fields: Any) -> list[pytest.TestReport]:
        return merge(ItemOutcome(ranks, 60.0, timed_out, 7.5, **fields), self.item, lambda: "pytest a.py", 3)

    def failure(self, *ranks: RankOutcome, **fields: Any) -> list[str]:
        """Return the lines of the report that failed."""
        (failed,) = (report for report in self.merge(*ranks, **fields) if report.failed)
        return [line for line in failed.longreprtext.splitlines() if line]


def died(ranks: Ranks, number: int, phases_over: int = 1, **fields: Any) -> RankOutcome:
    given = {"exitcode": -9, "output": "", "at": 1.5, **fields}
    reports = [made("setup", "passed", None, sections=[("out", "before")])] if phases_over else []
    return ranks.of(number, reports, fate=Died(phases_over=phases_over, **given))


def stuck(ranks: Ranks, number: int, phases: int = 1, **fields: Any) -> RankOutcome:
    status = {"stacks": f"stacks of {number}", "where": f"b.py:{number + 1} in f", **fields.pop("status", {})}
    reports = [made("setup", "passed", None)][:phases]
    fate = Stuck(RankStatus(**status), 1.0 + number, phases_over=phases, **fields)  # type: ignore[arg-type]
    return ranks.of(number, reports, fate=fate)
