"""The rank's side of pytest: a plugin that runs single items on request and sends their reports."""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from harness.lockstep import RunSubtests
from harness.properties.plugin import Properties
from harness.protocol import RANK_PLUGIN, Close, Collecting, Finished, ItemStarted, RunItem
from harness.rank import debugger
from harness.rank.baseline import Baseline
from harness.rank.capture import tee_where_captured_in_memory
from harness.rank.collection import RankCollection
from harness.rank.measuring import Measuring
from harness.rank.raised import describe_raised
from harness.rank.reporter import PHASES, RankReporter, failure
from harness.rank.state import RankState, count_collectives, count_groups

if TYPE_CHECKING:
    from harness.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback

# What the controller does once for all ranks, and no rank may do again: choosing and ordering items, stopping
# early, distributing, writing reports. An option that a missing plugin would add is left out.
_CONTROLLERS_OPTIONS: dict[str, Any] = {
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "cacheclear": False,
    "cacheshow": None,
    "setupshow": False,
    "durations": None,
    "xmlpath": None,
    "pastebin": None,
    "debug": None,
    "log_file": os.devnull,
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "distload": False,
    "tx": [],
}


class RankSession:
    """Runs items of the controller's choice inside a complete pytest session.

    Registered with `pytest.main` over the arguments the user typed, so root, ini-file, plugins, conftests and
    options mean what they mean in the controller.
    """

    def __init__(self, rank: Rank) -> None:
        self.__name__ = RANK_PLUGIN  # by this pytest names a plugin that is an object
        self._rank = rank
        self._spec = rank.spec
        self.world = rank.world
        self.lockstep = rank
        self.started = False
        self._collection = RankCollection()
        self._baseline = Baseline(rank)
        self._reporter = RankReporter(rank)
        self._properties = Properties(rank)

    # The session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, object, object]:
        tee_where_captured_in_memory(early_config)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        self._config = config
        options = vars(config.option)
        options.update({name: value for name, value in _CONTROLLERS_OPTIONS.items() if name in options})
        options["basetemp"] = self._spec.basetemp
        debugger.plug_in(config, self._rank)
        if self._spec.session.measures:
            config.pluginmanager.register(Measuring(config))
        config.pluginmanager.set_blocked("terminal")  # its options are parsed by now; only its output goes
        _block_reruns(config)
        # What pytest and its plugins write once a run, they do not write where they find this.
        config.workerinput = self._spec.session.workerinput  # type: ignore[attr-defined]
        return (yield)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.setupshow = False  # --setup-only has asked for it again
        for plugin in (
            self._collection,
            self._rank.copies,
            self._baseline,
            self._reporter,
            self._properties,
        ):
            config.pluginmanager.register(plugin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # nothing yet: a file is collected when the first of its items is asked for

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.started = True
        self._baseline.start()
        self._rank.ready()
        while True:
            match self._rank.next_order():
                case RunItem() as order:
                    self._run(session, order)
                case Close():
                    return True

    def _run(self, session: pytest.Session, order: RunItem) -> None:
        self._baseline.end_groups()
        item, next_item = self._collect(session, order)
        if item is None:
            self._reporter.send(_missing(order, self._collection.error_of(order.path)))
            self._rank.group.sever()
        else:
            self.world.enter_test(order.shared_tmp_path)
            self._reporter.begin(item)
            self._rank.reseed()
            with self._properties.of_item(order.search):
                self._run_protocol(item, next_item)
        checks = self._config.getoption("check_collectives")
        doing = replace(self._rank.collectives(), state="idle") if checks else None
        usable = torch.distributed.is_initialized() and self._baseline.is_restored
        self._rank.finish(Finished(usable, count_collectives(), count_groups(), doing))

    def _collect(self, session: pytest.Session, order: RunItem) -> list[pytest.Item | None]:
        """Find the item and its next one. What a file changes when it is imported stands from then on."""
        wanted = [(order.nodeid, order.path), *([order.next_item] if order.next_item else [])]
        news = not all(self._collection.knows(path) for _, path in wanted)
        before = RankState.capture() if news else None
        if news:
            self._rank.send(Collecting(next(p for _, p in wanted if not self._collection.knows(p))))
        found = [self._collection.find(session, nodeid, path) for nodeid, path in wanted]
        if before is not None:
            self._baseline.adopt(before)
            self._rank.send(ItemStarted())
        return found if order.next_item else [*found, None]

    def _run_protocol(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        except BaseException as error:
            if self._rank.interrupted and isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
                raise  # pytest tears down what is up and ends the session
            # KeyboardInterrupt, pytest.exit, or whatever a hook raises. Inside one rank it is that test's
            # failure; stopping the run is the controller's.
            phase = PHASES[min(self._reporter.phases_over, 2)]
            report = failure(item.nodeid, item.location, _represent(item, error), phase)
            self._reporter.pytest_runtest_logreport(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Tear down what was kept up for another item.

        Under pytest-xdist a controller knows its next item, but not whether the next one of this world will
        be its own.
        """
        item.session._setupstate.teardown_exact(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        result = yield
        runner = pyfuncitem.funcargs.get("run_subtests")
        if isinstance(runner, RunSubtests):
            runner.skip_if_nothing_ran()
        return result


def _block_reruns(config: pytest.Config) -> None:
    """Leave pytest-rerunfailures out: a rank that ran an item again would do so alone."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        config.pluginmanager.set_blocked("rerunfailures")
        config.addinivalue_line("markers", "flaky: of pytest-rerunfailures; does nothing on ranks")


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed random, numpy's legacy generator, and torch's generators of the CPU and of the rank's device.

    Not by `torch.manual_seed`: it also queues a seed for every kind of device that was never used, with a
    formatted stack each, which takes longer than a small test.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _represent(item: pytest.Item, error: BaseException) -> object:
    """Return pytest's representation of a failure; as text where a repr in it raises what pytest lets out."""
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
