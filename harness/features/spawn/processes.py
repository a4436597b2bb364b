"""The processes that a test has started itself: how they ended, what is left of them. Controller's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.controller.pytest_internals import make_report
from lockstep.controller.rerun import rerun_line
from lockstep.exceptions import RankLeakWarning
from lockstep.features.spawn.deadline import LOOK_EVERY, Deadline, Limits
from lockstep.features.spawn.failure import failure_path, stacks_path
from lockstep.features.spawn.hang import collective_in, diagnose, failed_by_hang
from lockstep.features.spawn.held import held_by_modules
from lockstep.features.spawn.messages import FEATURE
from lockstep.features.spawn.multiprocessing_internals import (
    end_pools,
    exit_code_of,
    is_unseen,
    start_method_of,
)
from lockstep.features.spawn.starter import Started
from lockstep.launch.multiprocessing_internals import server_pid
from lockstep.process_tree import children_of, end, is_running
from lockstep.protocol import Finished, RankStatus
from lockstep.reporting.merge import merge
from lockstep.tracebacks import shorten, user_line
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

PATIENCE = 0.5
"""Seconds between SIGTERM and SIGKILL for what a test has left."""
STACKS_WITHIN = 5.0
"""The same for what hangs: it writes its stacks in between, on a busy machine too."""

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
        self._item: pytest.Item | None = None
        self._controller = os.getpid()
        self._hung: set[int] = set()
        """Pids of processes that were ended as their time was over."""
        self._threads: set[int | None] = set()
        """Threads that were there before the item: that of a pool, say, which replaces a process."""

    def begin(self, item: pytest.Item) -> None:
        """Forget the processes of the item before."""
        self._item, self._of_item, self._began = item, [], time.monotonic()
        self._hung.clear()
        self._threads = {thread.ident for thread in threading.enumerate()} - {threading.main_thread().ident}
        self._of_fixtures = [each for each in self._of_fixtures if _is_alive(each)]

    def add(self, started: Started) -> None:
        """Note a process that was started."""
        is_wide = self._wide or threading.get_ident() in self._threads
        (self._of_fixtures if is_wide else self._of_item).append(started)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        wide = fixturedef.scope != "function"
        self._wide += wide
        try:
            return (yield)
        finally:
            self._wide -= wide

    def pids(self) -> set[int]:
        """Return the processes that items and fixtures have started, and those that these have started."""
        started = {each.process.pid or 0 for each in (*self._of_fixtures, *self._of_item) if _is_alive(each)}
        if not self.directory:
            return started
        recorded = {int(path.stem) for path in Path(self.directory, "spawned").glob("*.stacks")}
        return started | {pid for pid in recorded if is_running(pid)}

    # A hang

    def await_context(self, context: Any) -> None:
        """Wait until a process of a `ProcessContext` has ended, or its time is over: then end them all.

        Raises:
            pytest.fail.Exception: time was over; it has the report of all processes.
        """
        __tracebackhide__ = True
        processes: list[BaseProcess] = context.processes
        if any(start_method_of(each) == "fork" for each in processes):
            return
        if seconds := self._wait([*context.sentinels]):
            self._end_hung(processes)
            raise self._failure_of(processes, seconds)

    def await_process(self, pid: int, sentinel: int) -> None:
        """Wait until a process has ended, or its time is over: then end all that run the same function.

        Raises:
            pytest.fail.Exception: time was over.
        """
        __tracebackhide__ = True
        if not (seconds := self._wait([sentinel])):
            return
        everything = (*self._of_fixtures, *self._of_item)
        target = next((each.target for each in everything if each.process.pid == pid), "")
        alike = [each for each in everything if each.target == target and _is_alive(each)]
        self._end_hung([each.process for each in alike])
        said = [f"{_named(each)} has not ended within {seconds:.0f} s" for each in alike]
        text = [self._stacks_of(each.process.pid or 0) for each in alike]
        pytest.fail("\n".join(f"{what}\n{shorten(stacks)}" for what, stacks in zip(said, text, strict=True)))

    def _wait(self, sentinels: list[int]) -> float:
        """Return 0 once a process has ended; the seconds that it has had, where its time is over before."""
        is_here = os.getpid() == self._controller and threading.current_thread() is threading.main_thread()
        if self._item is None or not is_here:
            return 0
        deadline = Deadline(Limits.read(self._config), self.pids)
        while not connection.wait(sentinels, LOOK_EVERY):
            if time.monotonic() >= deadline.moment():
                return deadline.seconds()
        return 0

    def _end_hung(self, processes: Sequence[BaseProcess]) -> None:
        self._hung |= {each.pid or 0 for each in processes if each.is_alive()}
        end(lambda: {pid for pid in self._hung if is_running(pid)}, STACKS_WITHIN)
        for each in processes:
            each.join(STACKS_WITHIN)  # until the server has seen it, they count as alive

    def _failure_of(self, processes: Sequence[BaseProcess], seconds: float) -> BaseException:
        """Return what fails the test, and is not caught by it: a call of `spawn` would not have returned."""
        item = self._item
        assert item is not None, "no item runs"
        ranks = tuple(self._outcome(item, rank, each, -1) for rank, each in enumerate(processes))
        statuses = {each.rank: each.fate.status for each in ranks if isinstance(each.fate, Stuck)}
        outcome = ItemOutcome(
            ranks,
            timeout=round(seconds, 1),
            timed_out=True,
            seconds=seconds,
            diagnosis=diagnose(statuses),
            parts={FEATURE: {}},
        )
        return failed_by_hang(self._merge(item, outcome))

    # A failure

    def report_of(self, item: pytest.Item, pid: int) -> pytest.TestReport | None:
        """Return one report of all processes of a call of `spawn`, of which one has failed."""
        group = self._group_of(pid)
        if not group or not self.directory:
            return None
        ranks = tuple(self._outcome(item, rank, each, pid) for rank, each in enumerate(group))
        seconds = time.monotonic() - self._began
        return self._merge(item, ItemOutcome(ranks, timeout=seconds, timed_out=False, seconds=seconds))

    def _merge(self, item: pytest.Item, outcome: ItemOutcome) -> pytest.TestReport | None:
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
        reports = [self._passed(item, "setup")]  # what a process did after that says nothing more
        if pid in self._hung:
            return RankOutcome(rank, reports, fate=Stuck(self._status_of(pid), now, phases_over=1))
        if record.exists():
            data: dict[str, Any] = pickle.loads(record.read_bytes())
            named = {"nodeid": item.nodeid, "location": item.location}
            return RankOutcome(rank, [*reports, {**data, **named}], fate=Finished(True, 0, 0))
        if code == 0:
            return RankOutcome(rank, reports, fate=Finished(True, 0, 0))
        if pid != failed and self._stacks_of(pid):
            return RankOutcome(rank, reports, fate=Stuck(self._status_of(pid), now, phases_over=1))
        return RankOutcome(rank, reports, fate=Died(code, "", now, phases_over=1))

    def _stacks_of(self, pid: int) -> str:
        """Return the stacks that a process has written as it was terminated; "" if there are none."""
        with contextlib.suppress(OSError):
            return stacks_path(self.directory, pid).read_text()
        return ""

    def _status_of(self, pid: int) -> RankStatus:
        text = self._stacks_of(pid)
        where = user_line(text, str(self._config.invocation_params.dir))
        ends = " in _wrap" in text and "the report of its own failure"
        return RankStatus(shorten(text), where or ends or "code that is not the test's", collective_in(text))

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
        if not self._of_item and not (self.pids() and self._strays()):  # those that its ranks have started
            return
        self._keep_held()
        said = [_of_running(each) for each in self._of_item if _is_alive(each)]
        said += [
            _of_failed(each)
            for each in self._of_item
            if each.process.pid not in self._hung and not _is_alive(each) and _has_failed_unseen(each)
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

    def _keep_held(self) -> None:
        """Take processes that modules hold for those of fixtures: later items use them, too."""
        alive = [each for each in self._of_item if _is_alive(each)]
        held = held_by_modules(each.process for each in alive) if alive else set()
        self._of_fixtures += [each for each in alive if id(each.process) in held]
        self._of_item = [each for each in self._of_item if id(each.process) not in held]

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
        """End what fixtures and modules have left when the session is over; return a line for each."""
        if any(map(_is_alive, self._of_fixtures)):
            end_pools()
        left = [each for each in (*self._of_fixtures, *self._of_item) if _is_alive(each)]
        lines = [f"the session left behind {_of_running(each)}" for each in left]
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
