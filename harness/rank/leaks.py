"""The guard of open resources: finds what a test has left open, and ends the processes among it."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from multiprocessing import shared_memory
from typing import Any, Literal

from harness.exceptions import RankLeakWarning
from harness.process_tree import POLL_EVERY, adopt_orphans, end
from harness.rank.open_resources import OpenResources, reap

Policy = Literal["warn", "error", "off"]

SETTLE_WITHIN = 0.1
"""Seconds that something gets to end which a test has stopped but not waited for."""
TERMINATE_WITHIN = 0.2
"""Seconds between SIGTERM and SIGKILL for a process that was left."""


class LeakGuard:
    """Compares what a rank has open after a test's tear-down with what it had before the test's set-up.

    Args:
        policy: of the ini option `ranks_leaks`. Under "off" only processes are looked for; they are ended in
            any case.
    """

    warning: type[Warning] = RankLeakWarning

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._segments: set[str] = set()
        self.baseline = OpenResources.capture_children()
        adopt_orphans()  # a process that outlives the one that the test started is the test's too
        if policy != "off":
            _record_segments(self._segments)

    def capture(self) -> OpenResources:
        return OpenResources.capture_children() if self._policy == "off" else OpenResources.capture()

    def before(self) -> None:
        self.baseline = self.capture()

    def after(self, raised: bool) -> Sequence[str]:
        left = self.capture() - self.baseline
        if left and raised:
            left = left.without_what_variables_hold()
        if not left or not (left := self._settle(left)):
            return ()
        lines = left.describe()
        self._end_processes()
        return lines

    def _settle(self, left: OpenResources) -> OpenResources:
        """Return what stays after a collection of garbage and a moment for what is about to end."""
        reap(left.children)
        left = left.of_tests(self._segments)
        if left.threads or left.files or left.segments:
            gc.collect()
            left = left.of_tests(self._segments)
        until = time.monotonic() + SETTLE_WITHIN
        # Files, too: the thread that answers the controller opens and closes some meanwhile.
        while (left.children or left.threads or left.files) and time.monotonic() < until:
            time.sleep(POLL_EVERY)
            reap(left.children)
            left = (left & self.capture()).of_tests(self._segments)
        return left

    def _end_processes(self) -> None:
        """End new children, and whatever becomes a child of this rank as they end."""

        def left() -> set[int]:
            new = OpenResources.capture_children() - self.baseline
            reap(new.children)
            return set(new.of_tests(self._segments).children)

        end(left, TERMINATE_WITHIN)
        left()  # the last of them may have ended after it was waited for in vain


def _record_segments(names: set[str]) -> None:
    """Add to `names` the segments that this process makes: /dev/shm has those of all processes."""
    make = shared_memory.SharedMemory.__init__

    @functools.wraps(make)
    def recorded(self: Any, name: str | None = None, create: bool = False, *args: Any, **kwargs: Any) -> None:
        make(self, name, create, *args, **kwargs)
        if create:
            names.add(self.name)

    shared_memory.SharedMemory.__init__ = recorded  # type: ignore[method-assign]
