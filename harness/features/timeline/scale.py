"""The horizontal scale of a picture: in the order of time, with long waits compressed. In the controller."""

from __future__ import annotations

import bisect
import math

from lockstep.features.timeline.timeline import Timeline

END = 40.0
"""Units for the end of a collective that was not recorded: all that is known is that it came later.
Three characters of a label fit."""
FAULT = 240.0
"""Units before the end of a picture of a fault: labels of what waits there, and never came, can be read."""


class Scale:
    """Places moments of a timeline from left to right.

    Between two moments at which something begins or ends there is a distance that grows with the logarithm
    of the time: a step of 5 ms and the wait of 2 s that follows can both be read.

    Attributes:
        width: width of the whole, in units: the width in pixels below which labels become illegible.
    """

    def __init__(self, timeline: Timeline) -> None:
        bars = [bar for lane in timeline.lanes for bar in lane.bars]
        unknown_ends = {bar.end for bar in bars if not bar.has_end and bar.state in ("over", "inferred")}
        moments = {timeline.begun, timeline.end, *(bar.begun for bar in bars), *(bar.end for bar in bars)}
        moments |= {lane.died_at for lane in timeline.lanes if lane.died_at is not None}
        self._moments = sorted(moment for moment in moments if moment >= timeline.begun)
        self._lefts: list[float] = []
        self._rights: list[float] = []
        at = 0.0
        for i, moment in enumerate(self._moments):
            if i:
                at += 6 + 16 * math.log10(1 + (moment - self._moments[i - 1]) / 20_000)
            if moment == timeline.end and timeline.has_fault():
                at += FAULT
            self._lefts.append(at)
            at += END if moment in unknown_ends else 0.0
            self._rights.append(at)
        self.width = max(at, 1.0)

    def units(self, left: float, right: float) -> float:
        """Return a width in units, of two places in per cent."""
        return (right - left) * self.width / 100

    def left(self, moment: int) -> float:
        """Return where a moment is, in per cent of the width."""
        return self._place(moment, self._lefts)

    def right(self, moment: int) -> float:
        """Return the same, after what ended at that moment or later."""
        return self._place(moment, self._rights)

    def _place(self, moment: int, places: list[float]) -> float:
        i = bisect.bisect_left(self._moments, moment)
        if i == len(self._moments):
            return 100.0
        if self._moments[i] == moment:
            return 100 * places[i] / self.width
        if i == 0:
            return 0.0
        begin, end = self._moments[i - 1], self._moments[i]
        left, right = self._rights[i - 1], self._lefts[i]
        return 100 * (left + (right - left) * (moment - begin) / (end - begin)) / self.width
