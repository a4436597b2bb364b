"""What each rank said of an item, as pytest reports by phase.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from harness.marker import is_xfail_call
from harness.properties.messages import NOTES, SEED, STATISTICS
from harness.protocol import Finished
from harness.world.diagnosis import Diagnosis, place_of
from harness.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")

Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]
"""One exception of a chain, as pytest represents it."""


@dataclass(slots=True)
class RankReports:
    """One rank's reports of an item, by phase, and what it did not report itself."""

    rank: int
    phases: dict[str, pytest.TestReport] = field(default_factory=dict)
    subtests: dict[tuple[str, int], pytest.TestReport] = field(default_factory=dict)
    """By name, and which one of that name it is."""
    fate: Finished | Died | Stuck | None = None
    left_in_flight: str | None = None

    def reached(self) -> Phase:
        """The phase in which the rank ended without a word."""
        assert isinstance(self.fate, Died | Stuck)
        return PHASES[min(self.fate.phases_over, 2)]

    def skip(self) -> tuple[Phase, str] | None:
        """The phase and reason of the rank's skip, if it skipped."""
        for phase in PHASES:
            report = self.phases.get(phase)
            if report is not None and report.skipped and not hasattr(report, "wasxfail"):
                return phase, _skip_reason(report)
        return None

    def xfail_call(self) -> tuple[Phase, str] | None:
        """The phase and reason of the rank's call of `pytest.xfail()`, if it left the test that way."""
        for phase in PHASES:
            report = self.phases.get(phase)
            if report is not None and is_xfail_call(report):
                return phase, report.wasxfail
        return None

    def word(self) -> str:
        """What this rank says of the whole item, in a few words."""
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
    """What the merging of an item needs to know beside the reports."""

    config: pytest.Config
    item: pytest.Item
    timeout: float
    timed_out: bool
    seconds: float
    """How long the item took, as the controller sees it."""
    rerun: Callable[[], str]
    """The command that runs this item again."""
    seed: int
    diagnosis: Diagnosis | None
    """What was wrong between the ranks, if that can be told."""
    example: str = ""
    """The failing example of a property test, where no traceback tells it."""


def read_outcome(config: pytest.Config, outcome: RankOutcome) -> RankReports:
    ranks = RankReports(outcome.rank, fate=outcome.fate, left_in_flight=outcome.left_in_flight)
    counts: Counter[str] = Counter()  # two subtests of a test may have the same name
    for data in outcome.reports:
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        if type(report) is pytest.TestReport:
            ranks.phases[report.when] = report
        else:
            counts[report.head_line] += 1
            ranks.subtests[report.head_line, counts[report.head_line]] = report
    return ranks


def links(report: pytest.TestReport) -> list[Link]:
    """Return the chain of exceptions of a failure, empty if pytest has none but a text."""
    match report.longrepr:
        case ExceptionChainRepr() as longrepr:
            return list(longrepr.chain)
        case ReprExceptionInfo() as longrepr:  # under --tb=native
            return [(longrepr.reprtraceback, longrepr.reprcrash, None)]
        case _:
            return []


def messages(report: pytest.TestReport) -> list[str]:
    """Return the message of every exception of the report's chain, the one that ended the phase last."""
    messages = [crash.message for _, crash, _ in links(report) if crash is not None]
    # Where every frame is hidden there is no line to point at, but there is the text.
    messages = messages or re.findall(r"^E +(\S.*)$", report.longreprtext, re.MULTILINE)
    return messages or [report.longreprtext or "(no message)"]


def lines(report: pytest.TestReport) -> tuple[str, ...]:
    """Return the lines that the traceback goes through, the test's own first."""
    chain = links(report)
    own = f"{report.location[0]}:{(report.location[1] or 0) + 1}"
    if not chain:
        return (own,)
    places = (getattr(entry, "reprfileloc", None) for entry in chain[-1][0].reprentries)
    return tuple(f"{place.path}:{place.lineno}" for place in places if place is not None) or (own,)


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def skip_location(report: pytest.TestReport) -> tuple[str, int]:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[0]), report.longrepr[1]
    return report.location[0], report.location[1] or 0


@dataclass(frozen=True, slots=True)
class PropertyWords:
    """What was said of a property test, by the first rank that said it."""

    example: str
    """As Hypothesis tells it, with the line that reproduces it; empty if none failed."""
    rerun: str
    """What the command that runs the test again needs in addition."""
    statistics: str

    def add_statistics(self, merged: Sequence[pytest.TestReport]) -> None:
        """Put the statistics where Hypothesis's plugin looks for them, once."""
        for report in merged:
            vars(report).pop(STATISTICS, None)
        if self.statistics and merged:
            vars(merged[-1])[STATISTICS] = self.statistics


def read_properties(outcome: ItemOutcome) -> PropertyWords:
    """Find what the reports of ranks tell of a property test."""
    found: dict[str, str] = {}
    for report in (report for rank in outcome.ranks for report in rank.reports):
        for name in (NOTES, SEED, STATISTICS):
            if name in report:
                found.setdefault(name, str(report[name]))
    seed = found.get(SEED, "")
    rerun = f" --hypothesis-seed={seed}" if seed else ""
    return PropertyWords(found.get(NOTES, ""), rerun, found.get(STATISTICS, ""))
