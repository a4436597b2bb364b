"""The time that Hypothesis's engines go by: the same on every rank."""

from __future__ import annotations


class LockstepClock:
    """A clock that stands still but for votes, which carry the time of rank 0.

    It stands where the engine looks for the module `time`.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def advance(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    perf_counter = monotonic
