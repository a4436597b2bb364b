"""Examples of property tests in which ranks die or hang: the search continues in fresh worlds.

The test is run again with a list of the examples that ended a world so far; the engines draw the same
examples, and fail those of the list without running them. So Hypothesis itself finds the smallest.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lockstep.features.properties.messages import CRASHED, FEATURE, CrashedExample, RunningExample
from lockstep.protocol import Finished, RunItem
from lockstep.world.diagnosis import place_of
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

SEARCH_WITHIN = 30.0
"""Seconds, from the first crash on, in which smaller examples are looked for."""
MAX_CRASHES = 200
"""Worlds that the search of one test may end."""


def find_smallest(
    order: RunItem, outcome: ItemOutcome, run: Callable[[RunItem], ItemOutcome]
) -> ItemOutcome | None:
    """Run the test again until the smallest example that ends a world is found; return what to report.

    Args:
        run: runs an order in another world.
    """
    search, last = CrashSearch(), outcome
    while search.add(last):
        last = run(search.order(order))
    return None if last is outcome else search.to_report(last)


class CrashSearch:
    """The crashes of one test so far, and whether to run it again in search of a smaller example."""

    def __init__(self) -> None:
        self._crashed: list[CrashedExample] = []
        self._outcomes: list[ItemOutcome] = []  # of the test in the worlds that these examples ended
        self._began = 0.0
        self._was_last = False

    def add(self, outcome: ItemOutcome) -> bool:
        """Add the crash of this run, if it is one; return whether to run the test again, in another world."""
        culprit = _culprit(outcome)
        if culprit is None:
            return False
        example = _examples(outcome)[culprit.rank]
        known = any(example.is_same(crashed.example) for crashed in self._crashed)
        self._began = self._began or time.monotonic()
        self._crashed.append(CrashedExample(example, f"rank {culprit.rank} {_how(culprit)}"))
        self._outcomes.append(outcome)
        return not known and not self._was_last

    def order(self, order: RunItem) -> RunItem:
        """Return the order that runs the test again."""
        spent = time.monotonic() - self._began
        has_time = spent + self._outcomes[-1].seconds < SEARCH_WITHIN  # for a crash like the last one
        self._was_last = not has_time or len(self._crashed) >= MAX_CRASHES
        search = replace(order.parts[FEATURE], crashed=tuple(self._crashed), continues=not self._was_last)
        return replace(order, parts={**order.parts, FEATURE: search})

    def to_report(self, outcome: ItemOutcome) -> ItemOutcome:
        """Return the outcome to report: the test's last run, or the crash of the example it ended with."""
        reports = [report for rank in outcome.ranks for report in rank.reports]
        number = next((report[CRASHED] for report in reports if CRASHED in report), None)
        return outcome if number is None else replace(self._outcomes[number], last_run=outcome)


def _examples(outcome: ItemOutcome) -> dict[int, RunningExample]:
    """Return the examples that ranks were in, by rank."""
    found: dict[int, RunningExample] = outcome.parts.get(FEATURE, {})
    return found


def _culprit(outcome: ItemOutcome) -> RankOutcome | None:
    """Return the rank that crashed in an example: that died, or else that stood still."""
    examples = _examples(outcome)
    dead = [rank for rank in outcome.ranks if isinstance(rank.fate, Died) and not rank.excuse]
    if dead:
        return next((rank for rank in dead if rank.rank in examples), None)
    if any(rank.has_failed() or isinstance(rank.fate, Finished) for rank in outcome.ranks):
        return None  # a rank has ended the test on its own; what others do then is no example's fault
    stuck = [rank for rank in outcome.ranks if rank.rank in examples]
    blame = outcome.diagnosis.blame if outcome.diagnosis is not None else frozenset()
    return min(
        stuck, key=lambda rank: (rank.rank not in blame, _has_ended_example(rank), rank.rank), default=None
    )


def _has_ended_example(rank: RankOutcome) -> bool:
    return isinstance(rank.fate, Stuck) and rank.fate.status.state == "votes"


def _how(rank: RankOutcome) -> str:
    if isinstance(rank.fate, Died):
        return rank.fate.how
    return f"hung in {place_of(rank.fate.status)}" if isinstance(rank.fate, Stuck) else "was lost"
