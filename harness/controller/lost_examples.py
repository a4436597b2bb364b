"""Examples of property tests that kill or hang their ranks: the search goes on in fresh worlds.

The test is run again with a list of the examples that cost a world so far; the engines come to the same
examples, and fail those of the list without running them. So Hypothesis itself finds the smallest.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.properties.messages import CRASHED
from harness.protocol import CrashedExample, Finished, RunItem, RunningExample
from harness.world.diagnosis import place_of
from harness.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

SEARCH_WITHIN = 30.0
"""Seconds, from the first lost world on, in which smaller examples are looked for."""
MOST_LOST = 200
"""Worlds that one test may cost."""


@dataclass(frozen=True, slots=True)
class LostWorld:
    """An example that has cost a world, and what was said of the test in that world."""

    lost: CrashedExample
    outcome: ItemOutcome


class LostExamples:
    """What one test has cost so far."""

    def __init__(self) -> None:
        self._worlds: list[LostWorld] = []
        self._began = 0.0
        self._was_last = False

    def note(self, outcome: ItemOutcome, running: Sequence[RunningExample | None]) -> bool:
        """Note what an example has cost; return whether to run the test again, in another world.

        Args:
            running: the example that each rank was in at the end.
        """
        found = _find(outcome, running)
        if found is None:
            return False
        known = any(found.lost.example.is_same(world.lost.example) for world in self._worlds)
        self._began = self._began or time.monotonic()
        self._worlds.append(found)
        return not known and not self._was_last

    def order(self, order: RunItem) -> RunItem:
        """Return the order that runs the test again."""
        lost = tuple(world.lost for world in self._worlds)
        self._was_last = not self._searches_on()
        return replace(order, search=replace(order.search, crashed=lost, goes_on=not self._was_last))

    def _searches_on(self) -> bool:
        """Whether there is time for one more loss like the last one."""
        spent = time.monotonic() - self._began
        return spent + self._worlds[-1].outcome.seconds < SEARCH_WITHIN and len(self._worlds) < MOST_LOST

    def told_of(self, outcome: ItemOutcome) -> ItemOutcome:
        """Return what to tell of the test: its last run, or the one that the example found there has cost."""
        reports = [report for rank in outcome.ranks for report in rank.reports]
        number = next((report[CRASHED] for report in reports if CRASHED in report), None)
        return outcome if number is None else self._worlds[number].outcome


def _find(outcome: ItemOutcome, running: Sequence[RunningExample | None]) -> LostWorld | None:
    culprit = _culprit(outcome, running)
    example = None if culprit is None else running[culprit.rank]
    if culprit is None or example is None:
        return None
    return LostWorld(CrashedExample(example, f"rank {culprit.rank} {_how(culprit)}"), outcome)


def _culprit(outcome: ItemOutcome, running: Sequence[RunningExample | None]) -> RankOutcome | None:
    """Return the rank that was lost in an example: by its death, or else by standing still."""
    dead = [rank for rank in outcome.ranks if isinstance(rank.fate, Died)]
    if dead:
        return next((rank for rank in dead if running[rank.rank] is not None), None)
    if any(rank.has_failed() or isinstance(rank.fate, Finished) for rank in outcome.ranks):
        return None  # a rank has ended the test by itself; what others do then is no example's fault
    stuck = [rank for rank in outcome.ranks if running[rank.rank] is not None]
    blame = outcome.diagnosis.blame if outcome.diagnosis is not None else frozenset()
    return min(
        stuck, key=lambda rank: (rank.rank not in blame, _has_ended_example(rank), rank.rank), default=None
    )


def _has_ended_example(rank: RankOutcome) -> bool:
    return isinstance(rank.fate, Stuck) and rank.fate.doing.state == "votes"


def _how(rank: RankOutcome) -> str:
    if isinstance(rank.fate, Died):
        return rank.fate.how
    return f"hung in {place_of(rank.fate.doing)}" if isinstance(rank.fate, Stuck) else "was lost"
