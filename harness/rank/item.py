"""The guards of an item: what surrounds every test in a rank, in one order, called from one place.

A plugin of the rank's pytest session. Before set-up and after tear-down each guard in turn compares its part
of the process: standard streams, then state (which is restored), then open resources (of which processes are
ended). What a fixture of a wider scope than a function changes stands until the fixture ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from lockstep.backends import BACKENDS
from lockstep.backends.gloo import MOST_WAITING
from lockstep.exceptions import RankStateWarning
from lockstep.rank.dtensor_internals import DTensorResults
from lockstep.rank.pytest_internals import forget_ended_dependents, tear_down_except_for
from lockstep.rank.state import CrashReports, RankState
from lockstep.subtests import RunSubtests

if TYPE_CHECKING:
    import torch.distributed as dist

    from lockstep.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback


class Guard(Protocol):
    """One part of the process that tests must leave as they found it.

    Attributes:
        baseline: the part as tests start from it: a snapshot with the method `with_changes(before, after)`.
        warning: the category of the warning about what a test left behind.
    """

    baseline: Any
    warning: type[Warning]

    def capture(self) -> Any: ...
    def before(self) -> None: ...

    def after(self, raised: bool) -> Sequence[str]:
        """Restore what can be, and describe what the test left behind.

        Args:
            raised: whether the test has failed: pytest keeps its traceback, with what its variables hold.
        """
        ...


class ItemGuards:
    """Calls the guards of a rank around each item.

    Attributes:
        state: one of the guards.
        raised: Whether the item has failed in an earlier phase, or as was expected; the reporter sets it.
    """

    def __init__(self, rank: Rank, crash_reports: CrashReports) -> None:
        self._rank = rank
        self._streams = StreamGuard()
        self.state = StateGuard(self._streams, crash_reports, rank.spec.key.has_group)
        self.raised = False
        self._setups: list[list[Any]] = []
        """The snapshots from before each set-up under way of a wide fixture, the outermost first."""
        self._changes: dict[pytest.FixtureDef[Any], list[tuple[Any, Any]]] = {}
        """The snapshots from before and after the set-up of each wide fixture, guard by guard."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._streams)
        config.pluginmanager.register(self._rank.forks)
        self._policy = config.getini("ranks_leaks")
        guards = config.hook.pytest_ranks_guard(policy=self._policy)
        self._guards: tuple[Guard, ...] = (self.state, *guards)

    # Around an item

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._place = str(item.path), (item.location[1] or 0) + 1
        self.raised = False
        self._streams.before()
        for guard in self._guards:
            guard.before()
        # Under pytest-xdist a controller knows its next item, but not whether the next one of this world will
        # be its own: something may be set up that this item does not need.
        tear_down_except_for(item)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self._streams.before_call()
        # Of unittest, for which there is no pytest_pyfunc_call.
        result = yield from self._rank.forks.guard()
        self._rank.hook.pytest_ranks_called()
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        result = yield from self._rank.forks.guard()
        runner = pyfuncitem.funcargs.get("run_subtests")
        if isinstance(runner, RunSubtests):
            runner.skip_if_nothing_ran()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        state, *others = self._guards
        try:
            result = yield
            self._look([state])  # raises where warnings are errors
        except BaseException:
            # The world will not be used again, so its state may stay; but processes would outlive it.
            self._look(others, failed=True)
            raise
        self._look(others)
        for fixture in self._changes:
            forget_ended_dependents(fixture)
        return result

    def _look(self, guards: Sequence[Guard], failed: bool = False) -> None:
        """Report what the test has left, by the policy: in a warning, as a failure, or not at all.

        A test that has failed already does not fail for this too.
        """
        failure = ""
        for guard in guards:
            left = guard.after(self.raised or failed)
            if not left or self._policy == "off":
                continue
            text = f"the test left behind {'; '.join(left)}"
            if self._policy == "error" and not (self.raised or failed):
                failure, failed = f"{text} (ranks_leaks = error)", True
            else:
                warnings.warn_explicit(text, guard.warning, *self._place)
        if failure:
            pytest.fail(failure, pytrace=False)

    # Fixtures

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        befores = [guard.capture() for guard in self._guards]
        self._setups.append(befores)
        try:
            result = yield
        finally:
            self._setups.pop()
        changes = [(before, guard.capture()) for before, guard in zip(befores, self._guards, strict=True)]
        self._changes[fixturedef] = changes
        self._apply(changes)
        for outer in self._setups:  # fixtures that have requested this one: it is not theirs to undo
            outer[:] = [of.with_changes(*change) for of, change in zip(outer, changes, strict=True)]
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._rank.forks.end_child()
        if fixturedef in self._changes:
            self._apply([(after, before) for before, after in self._changes.pop(fixturedef)])

    def _apply(self, changes: Sequence[tuple[Any, Any]]) -> None:
        for guard, (before, after) in zip(self._guards, changes, strict=True):
            if before != after:
                guard.baseline = guard.baseline.with_changes(before, after)


class StateGuard:
    """Restores the state of the rank after each test.

    Args:
        has_group: Whether the world starts with a default process group.

    Attributes:
        is_restored: Whether all that the last test had changed could be restored.
    """

    warning: type[Warning] = RankStateWarning
    baseline: RankState

    def __init__(self, streams: StreamGuard, crash_reports: CrashReports, has_group: bool) -> None:
        self.is_restored = True
        self._streams = streams
        self._crash_reports = crash_reports
        self._has_group = has_group
        self._dtensor_results = DTensorResults()
        self._waiting: list[list[dist.ProcessGroup]] = []

    def capture(self) -> RankState:
        return RankState.capture()

    def start(self) -> None:
        """Take the state of now for what tests start from."""
        self._dtensor_results.install()
        self.baseline = self._last = RankState.capture()

    def adopt(self, before: RankState) -> None:
        """Accept what has changed since `before` not by a test, but by the harness."""
        self.baseline = self.baseline.with_changes(before, RankState.capture())

    def end_groups(self) -> None:
        """Destroy the process groups that the last test left, now that all ranks have ended it.

        The destructors of gloo's groups, each of which waits for an event loop, run together once there are
        more than `MOST_WAITING`.
        """
        if self._last.process_groups - self.baseline.process_groups:
            self._waiting += ([group] for group in self.baseline.end_groups())
            self._last = RankState.capture()
            if len(self._waiting) > MOST_WAITING:
                BACKENDS["gloo"].release(*self._waiting)
                self._waiting.clear()

    def before(self) -> None:
        """Accept what has changed since the last test: by the import of a file, or by a plugin."""
        if RankState.capture() != self._last:
            self.adopt(self._last)
        self._dtensor_results.begin_test()

    def after(self, raised: bool) -> Sequence[str]:
        baseline = self.baseline
        now = self._last = RankState.capture()
        if not self._has_group:  # the groups that a test makes there are expected; they end
            now = replace(now, process_groups=now.process_groups & baseline.process_groups)
        if raised:  # the harness has aborted its groups, and of nccl torch has none then
            now = replace(now, process_groups=now.process_groups | baseline.process_groups)
        left = self._streams.take_notes()
        if now != baseline:
            left = [*baseline.changes(now), *left]
            baseline.restore()
        self._crash_reports.enable()  # last: the test may have left another handler
        if now != baseline:
            self._last = RankState.capture()
            kept = self._last.process_groups & baseline.process_groups
            self.is_restored = not baseline.changes(replace(self._last, process_groups=kept))
        self._dtensor_results.end_test()
        return left


_STREAMS = ("stdout", "stderr")


class StreamGuard:
    """Keeps `sys.stdout` and `sys.stderr` open and in their place, and notes what tests tried.

    If a test closed or replaced them, pytest and every later test would write to nowhere. What is replaced
    under capture, pytest itself restores after each phase.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._of_fixtures: dict[str, Any] = {}
        self._notes: list[str] = []

    def take_notes(self) -> list[str]:
        """Return what the test did to the streams, a line each, and forget it."""
        notes, self._notes = self._notes, []
        return notes

    def before(self) -> None:
        self._before = {name: getattr(sys, name) for name in _STREAMS}
        for name, stream in self._before.items():
            if stream is not None and "close" not in vars(stream):
                stream.close = lambda name=name: self._notes.append(f"sys.{name} closed")

    def before_call(self) -> None:
        """Accept what fixtures have put in place of a stream: they restore it themselves."""
        self._of_fixtures = {name: getattr(sys, name) for name in _STREAMS}

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside of pytest's capture, where tests see their streams
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            for name, stream in self._before.items():
                now = getattr(sys, name)
                if now is not stream and now is not self._of_fixtures.get(name, stream):
                    setattr(sys, name, stream)
                    self._notes.append(f"sys.{name} replaced by {now!r}")
