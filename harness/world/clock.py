"""The time that an item has: its deadline, and the grace of ranks once another has failed.

Runs in the controller; standard library only.
"""

from __future__ import annotations

import math
import time

GRACE = 0.4
"""Seconds that the other ranks get once a rank has failed: enough to see a broken connection."""
MAX_GRACE = 3.0
"""Seconds that a rank gets at most which writes its report, or does not answer: a busy machine
takes long."""
COLLECT_WITHIN = 60.0
"""Seconds, at least, that importing a test file may take; it counts for no test."""


class Clock:
    """The moments, monotonic, at which the wait for the ranks of an item is over.

    Args:
        timeout: seconds for the item, without imports.

    Attributes:
        grace: When ranks that have not failed are looked at, as another has.
        importing: Files that ranks import, by rank.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout
        self.grace = self._last_grace = math.inf
        self.importing: dict[int, str] = {}

    def restart(self) -> None:
        """Let the seconds of the item begin now."""
        self.deadline = time.monotonic() + self.timeout

    def begin_import(self, rank: int, path: str) -> None:
        self.importing[rank] = path
        self.deadline = time.monotonic() + max(self.timeout, COLLECT_WITHIN)

    def end_import(self, rank: int) -> None:
        self.importing.pop(rank, None)
        if not self.importing:
            self.restart()

    def begin_grace(self) -> None:
        """Limit the time of ranks that have not failed, unless it is already."""
        now = time.monotonic()
        self.grace = min(self.grace, now + GRACE)
        self._last_grace = min(self._last_grace, now + MAX_GRACE)

    def prolong_grace(self) -> None:
        self.grace = time.monotonic() + GRACE

    def is_last_grace(self) -> bool:
        return time.monotonic() >= self._last_grace

    def end_grace(self) -> None:
        """Limit no rank's time any more."""
        self.grace = self._last_grace = math.inf
