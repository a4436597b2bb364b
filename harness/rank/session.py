"""The rank's side of pytest: a plugin that runs single items on request and sends their reports."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from harness.exceptions import RankStateWarning
from harness.lockstep import RunSubtests
from harness.protocol import RANK_PLUGIN, Began, Close, Collecting, Finished, Reported, RunItem, Warned
from harness.rank.collection import RankCollection
from harness.rank.leaks import Leaks
from harness.rank.state import RankState, count_collectives, count_groups, forget_meshes
from harness.rank.streams import Streams

if TYPE_CHECKING:
    from harness.rank.process import Rank

# What the controller does once for all ranks, and no rank may do again: choosing and ordering items, stopping
# early, distributing, debugging, writing reports. An option that a missing plugin would add is left out.
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
    "usepdb": False,
    "trace": False,
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
        self._baseline: RankState | None = None
        self._is_in_order = True
        self._last: RankState | None = None
        self._of_fixtures: dict[object, tuple[RankState, RankState]] = {}
        """What fixtures of wider scope have changed: the state before and after."""
        self._collection = RankCollection()
        self._streams = Streams()

    # The session

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        self._config = config
        options = vars(config.option)
        options.update({name: value for name, value in _CONTROLLERS_OPTIONS.items() if name in options})
        options["basetemp"] = self._spec.basetemp
        config.pluginmanager.set_blocked("terminal")  # its options are parsed by now; only its output goes
        # What pytest and its plugins write once a run, they do not write where they find this.
        config.workerinput = self._spec.session.workerinput  # type: ignore[attr-defined]
        return (yield)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.setupshow = False  # --setup-only has asked for it again
        config.pluginmanager.register(self._collection)
        config.pluginmanager.register(self._rank.copies)
        config.pluginmanager.register(self._streams)
        self._leaks = Leaks(self._spec.rank, config.getini("ranks_leaks"))
        config.pluginmanager.register(self._leaks)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # nothing yet: a file is collected when the first of its items is asked for

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.started = True
        self._baseline = self._last = RankState.capture()
        self._rank.ready()
        while True:
            match self._rank.next_order():
                case RunItem() as order:
                    self._run(session, order)
                case Close():
                    return True

    def _run(self, session: pytest.Session, order: RunItem) -> None:
        item, next_item = self._collect(session, order)
        if item is None:
            self._send_report(_missing(order, self._collection.error_of(order.path)))
        else:
            self.world.enter_test(order.shared_tmp_path)
            self._rank.reseed()
            self._run_protocol(item, next_item)
        usable = torch.distributed.is_initialized() and self._is_in_order
        self._rank.send(Finished(usable, count_collectives(), count_groups()))

    def _collect(self, session: pytest.Session, order: RunItem) -> list[pytest.Item | None]:
        """Find the item and its next one. What a file changes when it is imported stands from then on."""
        wanted = [(order.nodeid, order.path), *([order.next_item] if order.next_item else [])]
        news = not all(self._collection.knows(path) for _, path in wanted)
        before = RankState.capture() if news else None
        if news:
            self._rank.send(Collecting())
        found = [self._collection.find(session, nodeid, path) for nodeid, path in wanted]
        if before is not None and self._baseline is not None:
            self._baseline = self._baseline.with_changes(before, RankState.capture())
            self._rank.send(Began())
        return found if order.next_item else [*found, None]

    def _run_protocol(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            # Raised inside one rank they are that test's failure; stopping the run is the controller's.
            longrepr = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
            self.pytest_runtest_logreport(_failure(item.nodeid, item.location, longrepr, "call"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Tear down what was kept up for another item.

        Under pytest-xdist a controller knows its next item, but not whether the next one of this world will
        be its own. What has changed since the last test was no test's doing: plugins that run around tests,
        pytest-timeout say, may set a timer.
        """
        assert self._baseline is not None
        assert self._last is not None
        if (now := RankState.capture()) != self._last:
            self._baseline = self._baseline.with_changes(self._last, now)
        item.session._setupstate.teardown_exact(item)

    # Reporting

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send_report(report)
        if type(report) is not pytest.TestReport:
            return  # of a subtest: the test goes on
        self._rank.note_phases_over(("setup", "call", "teardown").index(report.when) + 1)
        if report.when != "teardown" and _raised(report):
            self._rank.group.sever()

    def _send_report(self, report: pytest.TestReport) -> None:
        config = self._config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        if data is None:
            why = (
                f"a report of the class {type(report).__name__} cannot leave a rank: no plugin serialises it"
            )
            report = _failure(report.nodeid, report.location, why, report.when)
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
        (self._rank.send if _raised(report) else self._rank.post)(Reported(_plain(data)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # those of start and collection are the controller's too
            category = warning_message.category
            text, filename = str(warning_message.message), warning_message.filename
            self._rank.post(
                Warned(category.__module__, category.__qualname__, text, filename, warning_message.lineno)
            )

    # Putting back what tests change

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
            self._is_in_order = not baseline.changes(self._last)
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

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        result = yield
        runner = pyfuncitem.funcargs.get("run_subtests")
        if isinstance(runner, RunSubtests):
            runner.skip_if_nothing_ran()
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        changes = self._of_fixtures.pop(fixturedef, None)
        if changes is not None and self._baseline is not None:
            before, after = changes
            self._baseline = self._baseline.with_changes(after, before)


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


def _raised(report: pytest.TestReport) -> bool:
    """Whether something was raised that is no skip, expected or not."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail"))


def _missing(order: RunItem, error: str) -> pytest.TestReport:
    text = error or (
        f"this rank collected {order.path} and did not find {order.nodeid} in it. The items of a file must "
        "be the same on every rank: does a parametrization depend on the rank, or on an unseeded random "
        "choice?"
    )
    return _failure(order.nodeid, (order.path, None, order.nodeid), text, "setup")


def _failure(nodeid: str, location: tuple[str, int | None, str], why: Any, when: Any) -> pytest.TestReport:
    return pytest.TestReport(nodeid, location, {}, "failed", why, when)


def _plain(value: Any) -> Any:
    """Reduce a value to what can be sent and reads the same without the rank's modules: a tensor to its text.

    Reports hold anything: recorded properties, and what users' hooks set as attributes.
    """
    match value:
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return (list if isinstance(value, list) else tuple)(map(_plain, value))
        case _:
            return value if value is None or type(value) in (bool, int, float, str) else str(value)
