"""What each test leaves behind in its rank: told after its tear-down, and ended where it can be.

A plugin of the rank's pytest session, beside `Baseline`, which puts changed state back.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Generator
from multiprocessing import shared_memory
from typing import Any, Literal

import pytest

from harness.exceptions import RankLeakWarning
from harness.process_tree import POLL_EVERY, adopt_orphans, end
from harness.rank.open_resources import OpenResources, reap

Policy = Literal["warn", "error", "off"]

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback

SETTLE_WITHIN = 0.1
"""Seconds that what a test has stopped, but not waited for, gets to end by itself."""
TERMINATE_WITHIN = 0.2
"""Seconds between SIGTERM and SIGKILL for a process that was left."""


class Leaks:
    """Compares what a rank has after a test's tear-down with what it had before the test's set-up.

    What a fixture of wider scope than a function starts stands until that fixture ends.

    Args:
        rank: its number, for the text.
        policy: what becomes of a test that leaves something: told in a warning, failed, or neither. Processes
            are ended in any case.
    """

    def __init__(self, rank: int, policy: Policy) -> None:
        self._rank = rank
        self._policy = policy
        self._standing = OpenResources.capture_children()
        self._of_fixtures: dict[object, OpenResources] = {}
        self._segments: set[str] = set()
        self._raised = False
        adopt_orphans()  # a process that outlives the one that the test started is the test's too
        if policy != "off":
            _note_segments(self._segments)

    def _capture(self) -> OpenResources:
        return OpenResources.capture_children() if self._policy == "off" else OpenResources.capture()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._place = str(item.path), (item.location[1] or 0) + 1
        self._raised = False
        self._standing = self._capture()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._raised |= report.failed or hasattr(report, "wasxfail")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException:
            self._look(failing=True)
            raise
        self._look(failing=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._capture()
        result = yield
        own = self._capture() - before
        for others in self._of_fixtures.values():  # set up meanwhile, as this one asked for them
            own -= others
        if own:
            self._of_fixtures[fixturedef] = own
            self._standing |= own
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if own := self._of_fixtures.pop(fixturedef, None):
            self._standing -= own

    def _look(self, failing: bool) -> None:
        left = self._capture() - self._standing
        if not left:
            return
        if self._raised or failing:
            # The traceback keeps what the test had in its variables, and pytest keeps the traceback.
            left = OpenResources(left.children, frozenset(), frozenset(), frozenset())
        if left := self._settle(left):
            lines = left.describe()
            self._end_processes()
            self.tell(RankLeakWarning, "; ".join(lines), failing=failing)

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
            left = (left & self._capture()).of_tests(self._segments)
        return left

    def _end_processes(self) -> None:
        """End new children, and whatever becomes a child of this rank as they end."""

        def left() -> set[int]:
            new = OpenResources.capture_children() - self._standing
            reap(new.children)
            return set(new.of_tests(self._segments).children)

        end(left, TERMINATE_WITHIN)
        left()  # the last of them may have ended after it was waited for in vain

    def tell(self, category: type[Warning], left: str, *, failing: bool = False) -> None:
        """Do what the policy says with what a test has left.

        Args:
            failing: the tear-down has failed already. What failed by itself is not failed for this too.
        """
        text = f"rank {self._rank}: the test left behind {left}"
        if self._policy == "off":
            return
        if self._policy == "error" and not (self._raised or failing):
            pytest.fail(f"{text} (ranks_leaks = error)", pytrace=False)
        warnings.warn_explicit(text, category, *self._place)


def _note_segments(names: set[str]) -> None:
    """Note the segments that this process makes: in /dev/shm they stand beside those of all processes."""
    make = shared_memory.SharedMemory.__init__

    @functools.wraps(make)
    def noted(self: Any, name: str | None = None, create: bool = False, *args: Any, **kwargs: Any) -> None:
        make(self, name, create, *args, **kwargs)
        if create:
            names.add(self.name)

    shared_memory.SharedMemory.__init__ = noted  # type: ignore[method-assign]
