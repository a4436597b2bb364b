"""The rank's side of pytest: a plugin that runs single items on request and sends their reports."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import numpy
import pytest
import torch
from _pytest.reports import pytest_report_to_serializable

from harness.cut import MOST_OF_A_MESSAGE, cut
from harness.exceptions import RankStateWarning
from harness.lockstep import RunSubtests
from harness.protocol import RANK_PLUGIN, Began, Close, Collecting, Finished, Reported, RunItem, Warned
from harness.rank import debugger
from harness.rank.capture import tee_where_captured_in_memory
from harness.rank.collection import RankCollection
from harness.rank.leaks import Leaks
from harness.rank.measuring import Measuring
from harness.rank.output import TestOutput
from harness.rank.plain import plain
from harness.rank.raised import describe_raised
from harness.rank.state import RankState, count_collectives, count_groups, forget_meshes
from harness.rank.streams import Streams
from harness.rank.xml_notes import XmlNotes
from harness.xfail import is_xfail_call

if TYPE_CHECKING:
    from harness.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback

PHASES: tuple[Literal["setup", "call", "teardown"], ...] = ("setup", "call", "teardown")

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
        self._baseline: RankState | None = None
        self._is_in_order = True
        self._last: RankState | None = None
        self._of_fixtures: dict[object, tuple[RankState, RankState]] = {}
        """What fixtures of wider scope have changed: the state before and after."""
        self._collection = RankCollection()
        self._phases_over = 0
        self._xml = XmlNotes()
        self._output = TestOutput(rank.spec.rank, rank.spec.session.output_directory)
        self._streams = Streams()

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
        # What pytest and its plugins write once a run, they do not write where they find this.
        config.workerinput = self._spec.session.workerinput  # type: ignore[attr-defined]
        return (yield)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.setupshow = False  # --setup-only has asked for it again
        config.pluginmanager.register(self._collection)
        self._xml.attach(config)
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
            self._rank.group.sever()
        else:
            self.world.enter_test(order.shared_tmp_path)
            self._output.begin(item)
            self._rank.reseed()
            self._run_protocol(item, next_item)
        doing = self._rank.collectives() if self._config.getoption("check_collectives") else None
        usable = torch.distributed.is_initialized() and self._is_in_order
        self._rank.finish(Finished(usable, count_collectives(), count_groups(), doing))

    def _collect(self, session: pytest.Session, order: RunItem) -> list[pytest.Item | None]:
        """Find the item and its next one. What a file changes when it is imported stands from then on."""
        wanted = [(order.nodeid, order.path), *([order.next_item] if order.next_item else [])]
        news = not all(self._collection.knows(path) for _, path in wanted)
        before = RankState.capture() if news else None
        if news:
            self._rank.send(Collecting(next(p for _, p in wanted if not self._collection.knows(p))))
        found = [self._collection.find(session, nodeid, path) for nodeid, path in wanted]
        if before is not None and self._baseline is not None:
            self._baseline = self._baseline.with_changes(before, RankState.capture())
            self._rank.send(Began())
        return found if order.next_item else [*found, None]

    def _run_protocol(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        self._phases_over = 0
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        except BaseException as error:
            if self._rank.interrupted and isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
                raise  # pytest tears down what is up and ends the session
            # KeyboardInterrupt, pytest.exit, or whatever a hook raises. Inside one rank it is that test's
            # failure; stopping the run is the controller's.
            phase = PHASES[min(self._phases_over, 2)]
            self.pytest_runtest_logreport(
                _failure(item.nodeid, item.location, _represent(item, error), phase)
            )

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

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        self._output.settle(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_of_subtest = type(report) is not pytest.TestReport
        if is_of_subtest:
            self._output.settle_subtest(report)
        self._send_report(report)
        if is_of_subtest:
            return  # the test goes on
        self._phases_over = PHASES.index(report.when) + 1
        self._rank.note_phases_over(self._phases_over)
        if report.when != "teardown" and _raised(report):
            self._rank.group.sever()

    def _send_report(self, report: pytest.TestReport) -> None:
        data = self._serialise(report)
        if notes := self._xml.take():
            data["xml_notes"] = notes
        if _raised(report):
            ends_phase = type(report) is pytest.TestReport and report.when != "teardown"
            self._rank.send(Reported(plain(data), self._rank.collectives() if ends_phase else None))
        else:  # posted reports are lost if the process dies: no loss, unless there is something to show
            (self._rank.send if _printed(report) else self._rank.post)(Reported(plain(data)))

    def _serialise(self, report: pytest.TestReport) -> dict[str, Any]:
        """Return pytest's serialised form of a report, or that of a failure that says why there is none."""
        why = f"a report of the class {type(report).__name__} cannot leave a rank: no plugin serialises it"
        data: dict[str, Any] | None
        try:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        except BaseException as error:  # of a hook of the user's, which would end the rank
            data, why = None, f"a report cannot leave a rank: a hook raised\n{describe_raised(error)}"
        if data is None:
            data = pytest_report_to_serializable(_failure(report.nodeid, report.location, why, report.when))
        assert data is not None
        return data

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._output.keep_of_file(report)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # those of start and collection are the controller's too
            category = warning_message.category
            text, filename = cut(str(warning_message.message), MOST_OF_A_MESSAGE), warning_message.filename
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
        __tracebackhide__ = True
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
    """Whether something was raised, expected or not, that is no skip and no `pytest.xfail()`."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail") and not is_xfail_call(report))


def _represent(item: pytest.Item, error: BaseException) -> object:
    """Return pytest's representation of a failure; as text where a repr in it raises what pytest lets out."""
    try:
        return item.repr_failure(pytest.ExceptionInfo.from_exception(error))
    except BaseException:
        return describe_raised(error)


def _printed(report: pytest.TestReport) -> bool:
    """Whether the phase has captured output, and another phase will follow."""
    return report.when != "teardown" and any(title.endswith(report.when) for title, _ in report.sections)


def _missing(order: RunItem, error: str) -> pytest.TestReport:
    text = error or (
        f"this rank collected {order.path} and did not find {order.nodeid} in it. The items of a file must "
        "be the same on every rank: does a parametrization depend on the rank, or on an unseeded random "
        "choice? Or has the file changed since pytest collected it?"
    )
    path, *names = order.nodeid.split("::")
    return _failure(order.nodeid, (path, None, ".".join(names)), text, "setup")


def _failure(nodeid: str, location: tuple[str, int | None, str], why: Any, when: Any) -> pytest.TestReport:
    return pytest.TestReport(nodeid, location, {}, "failed", why, when)
