"""The state of a rank that tests start from: kept, put back after each test; what a test has left is told."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from harness.exceptions import RankStateWarning
from harness.rank.leaks import Leaks
from harness.rank.state import RankState, forget_meshes
from harness.rank.streams import Streams

if TYPE_CHECKING:
    from harness.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback


class Baseline:
    """Keeps the state. A plugin of the rank's pytest session.

    Attributes:
        is_restored: Whether all that the last test had changed could be put back.
    """

    def __init__(self, rank: Rank) -> None:
        self.is_restored = True
        self._rank = rank
        self._streams = Streams()
        self._baseline: RankState | None = None
        self._last: RankState | None = None
        self._of_fixtures: dict[object, tuple[RankState, RankState]] = {}
        """What fixtures of wider scope have changed: the state before and after."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._streams)
        self._leaks = Leaks(self._rank.spec.rank, config.getini("ranks_leaks"))
        config.pluginmanager.register(self._leaks)

    def start(self) -> None:
        """Take the state of now for what tests start from."""
        self._baseline = self._last = RankState.capture()

    def adopt(self, before: RankState) -> None:
        """Let stand what has changed since `before`: not by a test, but by the import of its file, say."""
        assert self._baseline is not None
        self._baseline = self._baseline.with_changes(before, RankState.capture())

    def end_groups(self) -> None:
        """Destroy what process groups the last test has left, now that all ranks have ended it."""
        assert self._baseline is not None
        assert self._last is not None
        if self._last.process_groups - self._baseline.process_groups:
            self._baseline.end_groups()
            self._last = RankState.capture()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Adopt what has changed since the last test: plugins, pytest-timeout say, may set a timer."""
        assert self._last is not None
        if RankState.capture() != self._last:
            self.adopt(self._last)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        result = yield
        assert self._baseline is not None
        self._put_back(self._baseline)
        return result

    def _put_back(self, baseline: RankState) -> None:
        now = self._last = RankState.capture()
        left = self._streams.take_notes()
        if now != baseline:
            left = [*baseline.changes(now), *left]
            baseline.restore()
        self._rank.crash_reports.enable()  # last: the test may have left another handler
        if now != baseline:
            self._last = RankState.capture()
            kept = self._last.process_groups & baseline.process_groups
            self.is_restored = not baseline.changes(replace(self._last, process_groups=kept))
        forget_meshes()
        if left:
            self._leaks.tell(RankStateWarning, "; ".join(left))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Let what a fixture of wider scope than a function changes stand until that fixture ends."""
        if fixturedef.scope == "function" or self._baseline is None:
            return (yield)
        before = RankState.capture()
        result = yield
        now = RankState.capture()
        if now != before:
            self._of_fixtures[fixturedef] = before, now
            self._baseline = self._baseline.with_changes(before, now)
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        changes = self._of_fixtures.pop(fixturedef, None)
        if changes is not None and self._baseline is not None:
            before, after = changes
            self._baseline = self._baseline.with_changes(after, before)
