"""The processes that a test has started itself: how they ended, what is left of them. Controller's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.controller.pytest_internals import make_report
from lockstep.controller.rerun import rerun_line
from lockstep.exceptions import RankLeakWarning
from lockstep.features.spawn.failure import failure_path, stacks_path
from lockstep.features.spawn.multiprocessing_internals import exit_code_of, is_unseen
from lockstep.features.spawn.starter import Started
from lockstep.launch.multiprocessing_internals import server_pid
from lockstep.process_tree import children_of, end, is_running
from lockstep.protocol import Finished, RankStatus
from lockstep.reporting.merge import merge
from lockstep.tracebacks import shorten, user_line
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

PATIENCE = 0.5
"""Seconds between SIGTERM and SIGKILL for what a test has left."""


MAX_COMMAND = 60
"""Characters of a command that are shown."""


class TestProcesses:
    """The processes that items of the controller start, by the server or not.

    Args:
        directory: returns the controller's directory.
    """

    __test__ = False

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.directory = ""
        self._of_item: list[Started] = []
        self._of_fixtures: list[Started] = []
        self._wide = 0
        """Number of fixtures of a wider scope than a function whose set-up is under way."""
        self._began = 0.0

    def begin(self) -> None:
        """Forget the processes of the item before."""
        self._of_item, self._began = [], time.monotonic()
        self._of_fixtures = [each for each in self._of_fixtures if _is_alive(each)]

    def add(self, started: Started) -> None:
        """Note a process that was started."""
        (self._of_fixtures if self._wide else self._of_item).append(started)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        wide = fixturedef.scope != "function"
        self._wide += wide
        try:
            return (yield)
        finally:
            self._wide -= wide

    # A failure

    def report_of(self, item: pytest.Item, pid: int) -> pytest.TestReport | None:
        """Return one report of all processes of a call of `spawn`, of which one has failed."""
        group = self._group_of(pid)
        if not group or not self.directory:
            return None
        ranks = tuple(self._outcome(item, rank, each, pid) for rank, each in enumerate(group))
        seconds = time.monotonic() - self._began
        outcome = ItemOutcome(ranks, timeout=seconds, timed_out=False, seconds=seconds)
        reports = merge(outcome, item, lambda: rerun_line(item), self._config.getoption("world_seed"))
        return next((report for report in reports if report.failed), None)

    def _group_of(self, pid: int) -> list[BaseProcess]:
        """Return the processes of one call of `spawn`, by the pid of one of them."""
        group: list[BaseProcess] = []
        for started in (*self._of_fixtures, *self._of_item):
            if started.index == 0:
                if any(each.pid == pid for each in group):
                    break
                group = []
            if started.index is not None:
                group.append(started.process)
        return group if any(each.pid == pid for each in group) else []

    def _outcome(self, item: pytest.Item, rank: int, process: BaseProcess, failed: int) -> RankOutcome:
        code, now, pid = exit_code_of(process), time.time(), process.pid or 0
        record = failure_path(self.directory, pid)
        phases = ["setup"] if record.exists() else ["setup", "call", "teardown"]
        reports = [self._passed(item, phase) for phase in phases]
        if record.exists():
            data: dict[str, Any] = pickle.loads(record.read_bytes())
            named = {"nodeid": item.nodeid, "location": item.location}
            return RankOutcome(rank, [*reports, {**data, **named}], fate=Finished(True, 0, 0))
        if code == 0:
            return RankOutcome(rank, reports, fate=Finished(True, 0, 0))
        with contextlib.suppress(OSError):
            if pid != failed and (text := stacks_path(self.directory, pid).read_text()):
                where = user_line(text, str(self._config.invocation_params.dir))
                ends = " in _wrap" in text and "the report of its own failure"
                status = RankStatus(shorten(text), where or ends or "code that is not the test's")
                return RankOutcome(rank, reports[:1], fate=Stuck(status, now, phases_over=1))
        return RankOutcome(rank, reports[:1], fate=Died(code, "", now, phases_over=1))

    def _passed(self, item: pytest.Item, phase: str) -> dict[str, Any]:
        report = make_report(item, phase, "passed")
        data: dict[str, Any] = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        return data

    # The end of an item

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[Any]:
        result = yield
        self._look(item)
        return result

    def _look(self, item: pytest.Item) -> None:
        """End what the item has left; report that, and failures that it has not asked for.

        Raises:
            pytest.fail.Exception: under `ranks_leaks = error`.
        """
        if not self._of_item:
            return
        said = [_of_running(each) for each in self._of_item if _is_alive(each)]
        said += [
            _of_failed(each) for each in self._of_item if not _is_alive(each) and _has_failed_unseen(each)
        ]
        alive = {each.process.pid or 0 for each in self._of_item if _is_alive(each)}
        others = self._strays() - alive
        said += [f"process {pid} ({self._origin_of(pid)}), which was ended" for pid in sorted(others)]
        if alive | others:
            end(lambda: {pid for pid in alive if is_running(pid)} | self._strays(), PATIENCE)
        for started in self._of_item:
            with contextlib.suppress(ValueError, AssertionError):  # it was closed, or is of another process
                started.process.join(0)
        self._forget_files()
        policy = self._config.getini("ranks_leaks")
        if not said or policy == "off":
            return
        text = f"the test left behind {'; '.join(said)}"
        if policy == "error":
            pytest.fail(f"{text} (ranks_leaks = error)", pytrace=False)
        item.warn(RankLeakWarning(text))

    def _strays(self) -> set[int]:
        """Return processes that those of the item have left; none while a fixture has some of its own."""
        server = server_pid()
        if server is None or not self.directory or any(map(_is_alive, self._of_fixtures)):
            return set()
        below = {pid for pid in children_of(server) if is_running(pid)}
        try:
            spawned = {int(path.stem) for path in Path(self.directory, "spawned").glob("*.stacks")}
            ranks = {int(name) for name in os.listdir(f"{self.directory}/ranks")} - spawned
        except FileNotFoundError:  # the directory was removed: which of them are ranks is not known
            return set()
        return below - ranks

    def _origin_of(self, pid: int) -> str:
        if stacks_path(self.directory, pid).exists():
            return "started by a process of the test"
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
            return words.decode(errors="replace")[:MAX_COMMAND]
        return "ended"

    def _forget_files(self) -> None:
        for path in Path(self.directory, "spawned").glob("*.*"):
            if not is_running(int(path.stem)):
                path.unlink(missing_ok=True)
                Path(self.directory, "ranks", path.stem).unlink(missing_ok=True)

    def end_all(self) -> Sequence[str]:
        """End what fixtures have left when the session is over; return a line for each."""
        left = [each for each in (*self._of_fixtures, *self._of_item) if _is_alive(each)]
        lines = [f"fixtures left behind {_of_running(each)}" for each in left]
        pids = {each.process.pid or 0 for each in left}
        if pids:
            end(lambda: {pid for pid in pids if is_running(pid)}, PATIENCE)
        return lines


def _is_alive(started: Started) -> bool:
    try:
        return started.process.is_alive()
    except (ValueError, AssertionError):  # closed, or of another process
        return False


def _has_failed_unseen(started: Started) -> bool:
    """Whether a process has failed by itself, and the test has not asked how it ended."""
    return exit_code_of(started.process) not in (None, 0) and is_unseen(started.process)


def _of_running(started: Started) -> str:
    return f"{_named(started)}, which was running and was ended"


def _of_failed(started: Started) -> str:
    how = Died(exit_code_of(started.process), "", 0.0).how
    return f"{_named(started)}, which {how}; the test did not ask for that"


def _named(started: Started) -> str:
    return f"process {started.process.pid} ({started.process.name}, {started.target})"
