"""Reports of one rank on an item, by phase.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lockstep.protocol import TRIAL, Finished
from lockstep.pytest_internals import is_xfail_call
from lockstep.reporting.pytest_internals import keep_values
from lockstep.world.diagnosis import Diagnosis, place_of
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")


@dataclass(slots=True)
class RankReports:
    """One rank's reports of an item, by phase, and what it did not report itself."""

    rank: int
    phases: dict[str, pytest.TestReport] = field(default_factory=dict)
    subtests: dict[tuple[str, int], pytest.TestReport] = field(default_factory=dict)
    """Reports by the subtest's name, and which one of that name it is."""
    fate: Finished | Died | Stuck | None = None
    left_in_flight: str | None = None
    excused: str = ""
    """Words for its death, where a feature excuses that; its `fate` is None then."""

    @classmethod
    def read(cls, config: pytest.Config, outcome: RankOutcome) -> RankReports:
        """Deserialise the reports of one rank."""
        ranks = cls(outcome.rank, fate=outcome.fate, left_in_flight=outcome.left_in_flight)
        if outcome.excuse and isinstance(outcome.fate, Died):
            ranks.fate, ranks.excused = None, f"{outcome.fate.how}, {outcome.excuse}"
        counts: Counter[str] = Counter()  # two subtests of a test may have the same name
        for data in outcome.reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if type(report) is pytest.TestReport:
                ranks.phases[report.when] = report
            else:
                keep_values(report, data)
                counts[report.head_line] += 1
                ranks.subtests[report.head_line, counts[report.head_line]] = report
        return ranks

    def reached(self) -> Phase:
        """Return the phase in which the rank died or was killed."""
        assert isinstance(self.fate, Died | Stuck)
        return PHASES[min(self.fate.phases_over, 2)]

    def case(self) -> str:
        """Return the case of `run_subtests` that the rank was stuck in, "" if in none."""
        case = self.fate.status.case if isinstance(self.fate, Stuck) else ""
        return "" if case.startswith(TRIAL) else case

    def skip(self) -> tuple[Phase, str] | None:
        """Return the phase and reason of the rank's skip, if it skipped."""
        for phase in PHASES:
            report = self.phases.get(phase)
            if report is not None and report.skipped and not hasattr(report, "wasxfail"):
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
                return phase, reason.removeprefix("Skipped: ")
        return None

    def xfail_call(self) -> tuple[Phase, str] | None:
        """Return the phase and reason of a call of `pytest.xfail()`, if the rank left the test that way."""
        for phase in PHASES:
            report = self.phases.get(phase)
            if report is not None and is_xfail_call(report):
                return phase, report.wasxfail
        return None

    def word(self) -> str:
        """Say in a few words how the whole item went on this rank."""
        if self.excused:
            return self.excused
        if isinstance(self.fate, Died):
            return self.fate.how
        if isinstance(self.fate, Stuck):
            return f"was in {place_of(self.fate.status)}"
        if skip := self.skip():
            return f"skipped ({skip[1]})"
        if xfail := self.xfail_call():
            return f"xfailed ({xfail[1]})"
        failed = [phase for phase, report in self.phases.items() if report.failed]
        if any(report.skipped for report in self.phases.values()):
            return "failed as expected"
        return f"failed in {failed[0]}" if failed else "passed"


@dataclass(frozen=True, slots=True)
class Context:
    """Facts about an item, other than reports, that its merged reports depend on."""

    item: pytest.Item
    outcome: ItemOutcome
    rerun: Callable[[], str]
    """The command that runs this item again."""
    seed: int
    diagnosis: Diagnosis | None
    """The fault between the ranks, if known."""
    case: str = ""
    """The case of `run_subtests` that is reported; "" of the item itself."""
