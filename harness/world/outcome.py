"""The outcome of one item on the ranks of a world: reports, warnings, and how each rank ended it.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.protocol import Finished, Preparation, RankStatus, Vote, Warned
from lockstep.specification import RankSpec
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.rank_output import Sections

_PHASES = ["setup", "call", "teardown"]
STRICT_XPASS = "[XPASS(strict)]"
"""Beginning of pytest's report of a test that passed and was expected to fail."""


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended in the middle of the test."""

    exitcode: int | None
    output: str
    at: float
    """Wall-clock time, as in pytest's reports."""
    phases_over: int = 0
    """Number of phases that the rank had ended; it may not have sent the reports of all."""
    importing: str = ""
    """The test file that it imported at the time: the item's own or the next one's."""
    host_gone: str = ""
    """Name of the host that it ran on, where that is gone."""
    stood_still: bool = False
    """True if the harness ended it in a standstill, so that the others can go on."""

    @property
    def how(self) -> str:
        if self.host_gone:
            return f"was lost: host {self.host_gone} is gone"
        if self.stood_still:
            return "stood still, and was ended by the harness"
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

    status: RankStatus
    at: float
    phases_over: int = 0
    output: str = ""
    """Output outside of pytest's capture since the item began."""
    captured: Sections = ()
    """Output in the phase it was in."""
    importing: str = ""


Fate = Finished | Died | Stuck


def is_of_phase(report: Mapping[str, object]) -> bool:
    """Return whether a serialised report is of a phase of a test, and not of a subtest."""
    return report.get("$report_type") == "TestReport"


@dataclass(slots=True)
class RankOutcome:
    """The reports of one rank on one item, and how it ended."""

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    fate: Fate | None = None
    vote: Vote | None = None
    status: RankStatus | None = None
    """Status when it failed, or when it was ended."""
    host: str = ""
    """Name of the host that it runs on, where the ranks are on several."""
    world: str = ""
    """Size of its world, in words, where it stood for a rank of another size than the processes there are."""
    spec: RankSpec | None = None
    excuse: str = ""
    """Words for the reason why its death is no failure, "as the test expects" say."""
    has_left_world: bool = False
    """True if it had died, with an excuse, when the others met in a new world."""
    lost_others: list[float] = field(default_factory=list)
    """Wall-clock times at which it continued after a collective had lost other ranks."""
    left_in_flight: str | None = None
    """Description of what the rank had begun and others had not at the item's end."""

    def has_failed(self) -> bool:
        """Whether the rank is known to have failed a phase (after a failed subtest the test goes on)."""
        return (isinstance(self.fate, Died) and not self.excuse) or bool(self._failures())

    def has_xpassed(self) -> bool:
        """Whether the rank has passed the test, which was expected to fail: on another rank it still may."""
        return any(str(report["longrepr"]).startswith(STRICT_XPASS) for report in self._failures())

    def _failures(self) -> list[dict[str, Any]]:
        return [each for each in self.reports if each["outcome"] == "failed" and is_of_phase(each)]

    def parts(self) -> dict[str, Any]:
        """Return what features have sent at the end of the item, by the name of each."""
        return self.fate.parts if isinstance(self.fate, Finished) else {}

    def has_passed(self) -> bool:
        """Whether the rank has ended the item, and every phase of it passed."""
        is_over = isinstance(self.fate, Finished)
        return is_over and all(report["outcome"] == "passed" for report in self.reports)


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The outcomes of all ranks of one item, in rank order, and whether it ran into its deadline."""

    ranks: tuple[RankOutcome, ...]
    timeout: float
    timed_out: bool
    seconds: float
    """From the order to the last rank's end, collection included."""
    diagnosis: Diagnosis | None = None
    """Error between the ranks, if it is known."""
    diagnoses: Mapping[str, Diagnosis] = field(default_factory=dict)
    """The same of single cases of `run_subtests`, by name."""
    preparation: Preparation | None = None
    """The run for the item that took its place."""
    parts: dict[str, Any] = field(default_factory=dict)
    last_run: ItemOutcome | None = None
    """The outcome of the item's last run, where that of an earlier one is reported."""

    @property
    def world(self) -> str:
        """The size of the world, in words that follow "rank 1 of"."""
        return self.ranks[0].world or str(len(self.ranks))

    def has_fault(self) -> bool:
        """Whether a rank hung or died, or ranks called a collective differently."""
        is_over = all(isinstance(rank.fate, Finished) for rank in self.ranks)
        return self.diagnosis is not None or bool(self.diagnoses) or not is_over

    def is_clean(self) -> bool:
        """Whether the world can be trusted with another test."""
        finished = self.finished()
        return (
            len(finished) == len(self.ranks)
            and all(fate.usable for fate in finished)
            and len({(fate.collectives, fate.groups) for fate in finished}) == 1
            # One that was expected to fail leaves its world no better.
            and not any(
                report["outcome"] == "failed" or (report["outcome"] == "skipped" and "wasxfail" in report)
                for outcome in self.ranks
                for report in outcome.reports
            )
        )

    def has_passed(self) -> bool:
        """Whether it is clear of a clean outcome, before reports are compared, that the test has passed.

        Every rank has passed the three phases, without subtests, and nothing is known to be wrong.
        """
        return (
            self.diagnosis is None
            and all(rank.has_passed() and rank.left_in_flight is None for rank in self.ranks)
            and all([report["when"] for report in rank.reports] == _PHASES for rank in self.ranks)
        )

    def ended(self) -> set[int]:
        """Return the indices of the ranks that reached the end of the item."""
        return {index for index, outcome in enumerate(self.ranks) if isinstance(outcome.fate, Finished)}

    def finished(self) -> list[Finished]:
        """Return the messages of the ranks that reached the end of the item, in rank order."""
        return [outcome.fate for outcome in self.ranks if isinstance(outcome.fate, Finished)]


def label_of(nodeid: str, preparation: Preparation | None) -> str:
    """Return the node id of what runs: of the item, or of what takes its place."""
    if preparation is None:
        return nodeid
    file, _, names = nodeid.partition("::")
    name, bracket, parameters = names.partition("[")
    return f"{file}::{name}::{preparation.name}{bracket}{parameters}"


def in_preparation(preparation: Preparation, ranks: int) -> str:
    """Return the words before what is said of a run that takes an item's place."""
    return f"in the {preparation}, on {ranks} rank{'s' if ranks > 1 else ''} before the test:"
