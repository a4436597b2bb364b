"""A rank's pytest session: a plugin that collects and runs single items by the controller's order."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lockstep.hookspecs import RANK_PLUGIN, Ending
from lockstep.protocol import Close, Collecting, Finished, ItemStarted, Ready, RunItem, StartFailed
from lockstep.rank.collection import RankCollection
from lockstep.rank.item import ItemGuards
from lockstep.rank.output import capture_into, end_lines, prefix_streams
from lockstep.rank.process import Rank
from lockstep.rank.pytest_internals import attach_log_handlers_quickly, set_location, set_root
from lockstep.rank.reporter import PHASES, RankReporter, describe_raised, failure
from lockstep.rank.state import CrashReports, RankState
from lockstep.rank.torch_internals import count_collectives, count_groups, show_freed_tensors
from lockstep.specification import RankSpec
from lockstep.standing import Standing

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback

# What the controller does once for all ranks, and no rank may do again: choosing and ordering items, stopping
# early, distributing, writing reports. An option of a plugin that is missing is left out.
_CONTROLLER_OPTIONS: dict[str, Any] = {
    "maxfail": 0,
    "dist": "no",
    "tx": [],
    "log_file": os.devnull,
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "cacheclear"), False),
    "distload": False,
    **dict.fromkeys(("deselect", "cacheshow", "durations", "xmlpath", "pastebin", "debug"), None),
    **dict.fromkeys(("numprocesses", "maxprocesses"), None),
}


class RankSession:
    """Runs items of the controller's choice inside a complete pytest session.

    Registered with `pytest.main` over the arguments the user typed, so root, ini-file, plugins, conftests and
    options mean what they mean in the controller.

    Attributes:
        rank: the rank whose session this is.
        order: the last one that was run, or is.
        world: the value of the fixture `world`.
        started: Whether the session has come to its first item.
    """

    def __init__(self, spec: RankSpec, connection: Connection) -> None:
        self.__name__ = RANK_PLUGIN  # by this pytest names a plugin that is an object
        self.rank = rank = Rank(spec, connection)
        self._spec = spec
        self.world = rank.world
        self.order: RunItem | None = None
        self.started = False
        self._collection = RankCollection()
        self._crash_reports = CrashReports(spec.path_of("stacks"))
        self._guards = ItemGuards(rank, self._crash_reports)
        self._state = self._guards.state
        rank.adopt_state = self._state.adopt
        self._standing = Standing(spec)
        self._reporter = RankReporter(rank, self._standing, self._guards)
        self._freed_memory = FreedMemory()
        self._workerinput = worker_input(spec.session.workerinput, spec.rank, spec.key.size)

    def join(self) -> None:
        """Answer the controller from now on, and meet the other ranks in the default process group."""
        gc.enable()  # the server has it off
        self._crash_reports.enable()
        self.rank.join()

    def fail_to_start(self, why: str) -> None:
        """Send the controller why the session did not start."""
        self.rank.wire.send(StartFailed(why))

    def run(self, *, names_lines: bool) -> None:
        """Run items until the controller closes the session, and end the process.

        Args:
            names_lines: whether lines that are not captured begin with the name of the rank.
        """
        # Where torch logs, at level DEBUG, what every failed collective raises anyway: noise in reports.
        logging.getLogger("c10d-NullHandler-default").disabled = True
        capture_into(self._spec.path_of("captured"))
        given = self._spec.session
        if names_lines and not given.captures:
            prefix_streams(lambda: f"rank {self.world.rank}")
        attach_log_handlers_quickly()
        set_root(Path(given.rootdir), Path(given.inifile) if given.inifile else None)
        try:
            status = pytest.main(list(given.args), plugins=[self])
        except BaseException as error:
            if not self.started:  # sys.exit in a conftest: the process would end without a message
                self.fail_to_start(f"it raised before it ran a test\n{describe_raised(error)}")
            raise
        if not self.started:
            self.fail_to_start(f"pytest ended with status {int(status)} before it ran a test")
        self.rank.group.leave()
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # a test has closed it
                stream.flush()
        os._exit(0)  # threads that tests have left would keep the process

    # Hooks of pytest

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, object, object]:
        options = early_config.known_args_namespace
        if getattr(options, "capture", "no") == "sys":
            # Into memory, which ends with the rank: write to its log as well.
            options.capture = "tee-sys"
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        self._config = config
        self.rank.hook = config.hook
        options = vars(config.option)
        options.update({name: value for name, value in _CONTROLLER_OPTIONS.items() if name in options})
        options["basetemp"] = self._spec.basetemp
        config.pluginmanager.set_blocked("terminal")  # its options are parsed by now; only its output goes
        config.pluginmanager.set_blocked("terminalreporter")  # nor may a plugin put one there
        # What pytest and its plugins write once a run, they do not write where they find this.
        config.workerinput = self._workerinput  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        return (yield)

    def pytest_configure(self, config: pytest.Config) -> None:
        for plugin in (self._collection, self._guards, self._reporter):
            config.pluginmanager.register(plugin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        show_freed_tensors()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # nothing yet: a file is collected when the first of its items is ordered

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.started = True
        self._state.start()
        self._standing.await_item()
        self.rank.wire.send(Ready())
        hook = session.config.hook.pytest_ranks_idle
        is_over = hook if hook.get_hookimpls() else None
        while True:
            match self.rank.wire.next_order(is_over):
                case RunItem() as order:
                    self.order = order
                    self.rank.begin_item()
                    self._run(session, order)
                case Close():
                    return True

    def _run(self, session: pytest.Session, order: RunItem) -> None:
        self._state.end_groups()
        order = self._config.hook.pytest_ranks_begin(order=order) or order
        self.rank.group.begin_item()
        item, next_item = self._collect(session, order)
        if item is None:
            error = self._collection.errors[order.path] or self._differing_rootdir()
            self._reporter.send(_missing(order, error))
            self.rank.group.abort()
        else:
            self.world.enter_test(order.shared_tmp_path)
            if order.parts:
                item = self._config.hook.pytest_ranks_item(item=item, order=order) or item
            if order.location is not None:
                set_location(item, order.location)
            self._reporter.begin(item)
            self.rank.reseed()
            self._config.hook.pytest_ranks_run_item(item=item, nextitem=next_item, order=order)
        if not self._spec.session.captures:
            end_lines()
        checks = self._config.getoption("check_collectives")
        doing = replace(self.rank.status.collectives(), state="idle") if checks else None
        usable = self.rank.group.stands() and self._state.is_restored
        counts = count_collectives(), count_groups()
        ending = Ending(usable)
        self._config.hook.pytest_ranks_finished(ending=ending)
        self.rank.end_item(Finished(ending.usable, *counts, doing, ending.parts))
        self._standing.await_item()
        self._freed_memory.give_back()

    def _collect(self, session: pytest.Session, order: RunItem) -> list[pytest.Item | None]:
        """Return the item and its next one. What a file changes when it is imported stands from then on."""
        wanted = [(order.nodeid, order.path), *([order.next_item] if order.next_item else [])]
        new = next((path for _, path in wanted if path not in self._collection.errors), None)
        before = RankState.capture() if new else None
        if new:
            self.rank.wire.send(Collecting(new))
        found = [self._collection.find(session, nodeid, path) for nodeid, path in wanted]
        if before is not None:
            self._state.adopt(before)
            self.rank.wire.send(ItemStarted())
        return found if order.next_item else [*found, None]

    def _differing_rootdir(self) -> str:
        here, there = str(self._config.rootpath), self._spec.session.rootdir
        if here == there:
            return ""
        return (
            f"this rank has the rootdir {here}, where the pytest that you started has {there}, so that its "
            f"node ids are others: give it with --rootdir={there}"
        )

    def pytest_ranks_run_item(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._run_protocol(item, nextitem)
        return True

    def _run_protocol(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        except BaseException as error:
            if self.rank.wire.is_interrupted and isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
                raise  # pytest tears down what is up and ends the session
            # KeyboardInterrupt, pytest.exit, or whatever a hook raises. Inside one rank it is that test's
            # failure; stopping the run is the controller's.
            phase = PHASES[min(self._reporter.phases_over, 2)]
            report = failure(item.nodeid, item.location, _represent(item, error), phase)
            self._reporter.pytest_runtest_logreport(report)


GROWTH = 64 * 2**20
"""Bytes by which a rank has grown when it gives back what tests have freed."""


class FreedMemory:
    """Gives back to the system the memory that tests have freed, which the allocator keeps.

    Of one test of a ResNet, 0.7 GB stayed with each rank to the end of the run.
    """

    def __init__(self) -> None:
        # Of glibc; other allocators give back by themselves.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._figures: int | None = None
        with suppress(OSError):  # not every system has the file
            self._figures = os.open("/proc/self/statm", os.O_RDONLY)
        self._before = self._resident()

    def give_back(self) -> None:
        """Give memory back if this process has grown; it costs 1 ms, and more where there is much."""
        if self._trim is None:
            return
        if self._resident() > self._before + GROWTH:
            gc.collect()  # models are full of cycles
            self._trim(0)
            self._before = self._resident()

    def _resident(self) -> int:
        """Return the bytes of memory that this process holds, 0 where that is not known; 2 µs."""
        if self._figures is None:
            return 0
        return int(os.pread(self._figures, 100, 0).split()[1]) * mmap.PAGESIZE


def worker_input(given: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return what the session of a rank has as `config.workerinput`, and set the variables that go with it.

    Outside of pytest-xdist each rank is a worker of its own, "gw0" to "gwN": plugins and conftests take the
    number for ports, databases and files of a process. Under `pytest -n` ranks are called as their worker.
    """
    if given["workerid"] != "master":
        return {**given}
    made = {**given, "workerid": f"gw{rank}", "workercount": size}
    os.environ["PYTEST_XDIST_WORKER"] = made["workerid"]
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(size)
    os.environ["PYTEST_XDIST_TESTRUNUID"] = str(given["testrunuid"])
    return made


def _represent(item: pytest.Item, error: BaseException) -> object:
    """Return pytest's representation of a failure, or its text where a repr raises past pytest."""
    try:
        return item.repr_failure(pytest.ExceptionInfo.from_exception(error))
    except BaseException:
        return describe_raised(error)


def _missing(order: RunItem, error: str) -> pytest.TestReport:
    text = error or (
        f"this rank collected {order.path} and did not find {order.nodeid} in it. The items of a file must "
        "be the same on every rank: does a parametrization depend on the rank, or on an unseeded random "
        "choice? Or has the file changed since pytest collected it?"
    )
    path, *names = order.nodeid.split("::")
    return failure(order.nodeid, (path, None, ".".join(names)), text, "setup")
