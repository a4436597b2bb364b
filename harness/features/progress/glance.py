"""A look at a test that runs, for the user who waits for it: how far it has come, and where its ranks stand.

Made of the answers to the probes by which standstills are found. Runs in the controller; must not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import Progress, RankStatus
from lockstep.world.diagnosis import in_flight, named
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import is_of_phase

STANDS_AFTER = 2.0
"""Seconds after which a rank that has not moved is named with its place."""
SILENT = "not responding"


@dataclass(frozen=True, slots=True)
class Glance:
    """A test that runs, at one moment."""

    label: str
    elapsed: float
    """Seconds since it began."""
    limit: float
    """Seconds from its beginning to its deadline; infinite for a user who debugs."""
    activity: str
    """"subtest 17 of 144", "example 23", "imports test_a.py"; "" where nothing is known."""
    failed: int
    """Number of its subtests that have failed."""
    standing: str
    """Place of each rank, once one has stood still; else ""."""


class Places:
    """The place of each rank, and since when it is there, from its answers."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, float]] = {}
        self._counts: dict[int, str] = {}

    def note(self, rank: int, answer: RankStatus | Progress, now: float) -> None:
        """Note what a rank answers to a probe."""
        self._counts[rank] = answer.count
        if isinstance(answer, RankStatus):
            self._note(rank, _describe(answer), now)
        elif answer.where:
            self._note(rank, _line(answer), now, has_moved=answer.computes)

    def note_silent(self, ranks: Iterable[int], now: float) -> None:
        """Note that ranks have not answered the last probe."""
        for rank in ranks:
            self._note(rank, SILENT, now)

    def _note(self, rank: int, text: str, now: float, *, has_moved: bool = False) -> None:
        before, since = self._since.get(rank, ("", now))
        self._since[rank] = text, since if text == before and not has_moved else now

    def glance(self, run: ItemRun, now: float) -> Glance:
        """Return how far the test has come."""
        subtests = [[data for data in rank.reports if not is_of_phase(data)] for rank in run.outcomes]
        ended = min(map(len, subtests))
        activity = self.count() or (f"{ended} subtests ended" if ended else "")
        if importing := min(run.clock.importing.values(), default=""):
            activity = f"imports {importing}"
        failed = max(sum(data["outcome"] == "failed" for data in reports) for reports in subtests)
        begun = run.clock.begun
        return Glance(
            run.label, now - begun, run.clock.deadline - begun, activity, failed, self.standing(now)
        )

    def count(self) -> str:
        """Return which subtest or example the ranks are in, the first of them; "" if one is in none."""
        return min(
            self._counts.values(), key=lambda text: [int(word) for word in text.split()[1:2]], default=""
        )

    def standing(self, now: float) -> str:
        """Say what each rank is in, equal ones together, if one has stood still for long enough."""
        if not any(now - since >= STANDS_AFTER for _, since in self._since.values()):
            return ""
        by_text: dict[str, list[int]] = {}
        for rank, (text, _) in sorted(self._since.items()):
            by_text.setdefault(text, []).append(rank)
        return ", ".join(f"{named(ranks)} {text}" for text, ranks in by_text.items())


def _describe(status: RankStatus) -> str:
    match status.state:
        case "idle":
            return "at the end of the test"
        case "votes":
            return "at the end of its subtest"
        case "stopped":
            return "stopped"
        case "silent":
            return SILENT
        case "runs" | "reports":
            if (issued := in_flight(status)) is None:
                return _line(status)
            group = "" if issued.group == DEFAULT_GROUP else f" of group {issued.group}"
            return f"in {issued.op} #{issued.number}{group}"


def _line(answer: RankStatus | Progress) -> str:
    """Return "in save() at train.py:77", of the user's innermost line, or of what was called there."""
    place, _, function = answer.where.rpartition(" in ")
    call = answer.call or function
    return f"in {call}() at {place}" if call.isidentifier() else f"at {place or answer.where}"
