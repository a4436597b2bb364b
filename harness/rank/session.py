"""A rank's pytest session: a plugin that collects and runs single items by the controller's order."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Generator
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
from lockstep.rank.pytest_internals import (
    attach_log_handlers_quickly,
    expect_plugins,
    get_config,
    manage_fixtures_quickly,
    set_location,
    set_root,
    use_config,
)
from lockstep.rank.reporter import PHASES, RankReporter, describe_raised, failure
from lockstep.rank.state import CrashReports, seed_everything
from lockstep.rank.torch_internals import count_collectives, count_groups, show_freed_tensors
from lockstep.specification import PLUGIN, RankSpec
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

_CONFIG = get_config()
"""pytest's config before it has arguments, with its own plugins and ours, made as the server imports this
module: to register ours took a fifth of a rank's start."""
_CONFIG.pluginmanager.import_plugin(PLUGIN)


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
        self._collection = RankCollection(spec.session.rootdir)
        self._crash_reports = CrashReports(spec.path_of("stacks"))
        self._guards = ItemGuards(rank, self._crash_reports)
        self._state = self._guards.state
        rank.adopt_state = self._state.adopt
        self._standing = Standing(spec)
        self._reporter = RankReporter(rank, self._standing, self._guards)

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
        manage_fixtures_quickly()
        expect_plugins(given.to_rewrite)
        if not given.renames_plugin:
            use_config(_CONFIG)
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

    # The last of its hooks without an order of their own, as if the features were registered after it.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        self._config = config
        self.rank.hook = config.hook
        options = vars(config.option)
        options.update({name: value for name, value in _CONTROLLER_OPTIONS.items() if name in options})
        options["basetemp"] = self._spec.basetemp
        config.pluginmanager.set_blocked("terminal")  # its options are parsed by now; only its output goes
        config.pluginmanager.set_blocked("terminalreporter")  # nor may a plugin put one there
        # What pytest and its plugins write once a run, they do not write where they find this.
        config.workerinput = self._spec.workerinput()  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        for part in (self._collection, self._guards, self._reporter):
            config.pluginmanager.register(part)

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
                    self._run(session, order)
                case Close():
                    return True

    def _run(self, session: pytest.Session, order: RunItem) -> None:
        activity = self.rank.status.activity
        activity.state, activity.began, activity.meeting = "runs", time.time_ns(), None
        activity.item += 1
        self._state.end_groups()
        order = self._config.hook.pytest_ranks_begin(order=order) or order
        self.rank.group.begin_item()
        item, next_item = self._collect(session, order)
        if item is None:
            self._reporter.send(self._collection.report_missing(order, session))
            self.rank.group.abort()
        else:
            self.world.enter_test(order.shared_tmp_path)
            if order.parts:
                item = self._config.hook.pytest_ranks_item(item=item, order=order) or item
            if order.location is not None:
                set_location(item, order.location)
            self._reporter.begin(item)
            seed_everything(self._spec.seed, self.rank.group.device)
            self._config.hook.pytest_ranks_run_item(item=item, nextitem=next_item, order=order)
        if not self._spec.session.captures:
            end_lines()
        checks = self._config.getoption("check_collectives")
        doing = replace(self.rank.status.collectives(), state="idle") if checks else None
        usable = self.rank.group.stands() and self._state.is_restored
        counts = count_collectives(), count_groups()
        ending = Ending(usable)
        self._config.hook.pytest_ranks_finished(ending=ending)
        activity.state, activity.case, activity.count = "idle", "", ""
        self.rank.wire.send(Finished(ending.usable, *counts, doing, ending.parts))
        self._standing.await_item()

    def _collect(self, session: pytest.Session, order: RunItem) -> list[pytest.Item | None]:
        """Return the item and its next one; tell the controller of the import of a file."""
        wanted = [(order.nodeid, order.path), *([order.next_item] if order.next_item else [])]
        new = next((path for _, path in wanted if path not in self._collection.errors), None)
        if new:
            self.rank.wire.send(Collecting(new))
        selected = order.functions.get
        found = [self._collection.find(session, nodeid, path, selected(nodeid)) for nodeid, path in wanted]
        if new:
            self.rank.wire.send(ItemStarted())
        return found if order.next_item else [*found, None]

    def pytest_ranks_run_item(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except BaseException as error:
            if self.rank.wire.is_interrupted and isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
                raise  # pytest tears down what is up and ends the session
            # KeyboardInterrupt, pytest.exit, or whatever a hook raises. Inside one rank it is that test's
            # failure; stopping the run is the controller's.
            phase = PHASES[min(self._reporter.phases_over, 2)]
            report = failure(item.nodeid, item.location, _represent(item, error), phase)
            self._reporter.pytest_runtest_logreport(report)
        return True


def _represent(item: pytest.Item, error: BaseException) -> object:
    """Return pytest's representation of a failure, or its text where a repr raises past pytest."""
    try:
        return item.repr_failure(pytest.ExceptionInfo.from_exception(error))
    except BaseException:
        return describe_raised(error)
