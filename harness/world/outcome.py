"""What the ranks of a world said of one item, and how each of them ended it.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.protocol import Doing, Finished, Vote, Warned
from harness.world.diagnosis import Diagnosis
from harness.world.output import Sections


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended in the middle of the test."""

    exitcode: int | None
    output: str
    at: float
    """Wall-clock time, as in pytest's reports."""
    phases_over: int = 0
    """How many phases of the item the rank had ended; it may not have sent the reports of all."""
    importing: str = ""
    """The test file that it imported at the time: the item's own or the next one's."""

    @property
    def how(self) -> str:
        if self.exitcode is None:
            return "closed its connection to the controller"
        if self.exitcode >= 0:
            return f"exited with code {self.exitcode}"
        try:
            return f"died: {signal.Signals(-self.exitcode).name}"
        except ValueError:
            return f"died: signal {-self.exitcode}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """The rank was still running when its time was over, or when it could not get on, and was ended."""

    doing: Doing
    at: float
    phases_over: int = 0
    output: str = ""
    """What it wrote outside of pytest's capture since the item began."""
    captured: Sections = ()
    """What it had printed in the phase it was in."""
    importing: str = ""
    """The test file that it imported at the time: the item's own or the next one's."""


Fate = Finished | Died | Stuck


@dataclass(slots=True)
class RankOutcome:
    """What one rank said of one item, and how it ended."""

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    fate: Fate | None = None
    vote: Vote | None = None
    doing: Doing | None = None
    """What it was doing when it failed, or when it was ended."""
    left_in_flight: str | None = None
    """A collective of the default group that the rank had begun and others had not, at the item's end."""

    def has_failed(self) -> bool:
        """Whether the rank is known to have failed a phase (a failed subtest lets the test go on)."""
        return isinstance(self.fate, Died) or any(
            report["outcome"] == "failed" and report.get("$report_type") == "TestReport"
            for report in self.reports
        )


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What all ranks said of one item, in rank order, and whether it ran into its deadline."""

    ranks: tuple[RankOutcome, ...]
    timeout: float
    timed_out: bool
    seconds: float
    """From the order to the last rank's end, collection included."""
    diagnosis: Diagnosis | None = None
    """What was wrong between the ranks, if it can be told."""
    diagnoses: Mapping[str, Diagnosis] = field(default_factory=dict)
    """The same of single points of `run_subtests`, by name."""

    def is_clean(self) -> bool:
        """Whether the world can be trusted with another test."""
        finished = self.finished()
        return (
            len(finished) == len(self.ranks)
            and all(fate.usable for fate in finished)
            and len({(fate.collectives, fate.groups) for fate in finished}) == 1
            and not any(_tells_of_failure(report) for outcome in self.ranks for report in outcome.reports)
        )

    def finished(self) -> list[Finished]:
        """What the ranks that reached the end of the item said there, in rank order."""
        return [outcome.fate for outcome in self.ranks if isinstance(outcome.fate, Finished)]


def _tells_of_failure(report: dict[str, Any]) -> bool:
    """Whether a test raised; one that was expected to leaves its world no better."""
    return report["outcome"] == "failed" or (report["outcome"] == "skipped" and "wasxfail" in report)
