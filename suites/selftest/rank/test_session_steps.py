"""Single steps of a rank's session, in this process: its start, its orders, one item, and its end."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from lockstep.hookspecs import RANK_PLUGIN, Ending
from lockstep.protocol import (
    Close,
    Collecting,
    Finished,
    Interrupt,
    ItemStarted,
    RankStatus,
    Ready,
    RunItem,
    StartFailed,
)
from lockstep.rank import session as module
from lockstep.rank.session import RankSession
from lockstep.rank.status import Activity
from lockstep.specification import RankSpec, SessionSpec, WorldKey

PARTS = (
    *("Rank", "RankCollection", "CrashReports", "ItemGuards", "Standing", "RankReporter", "gc"),
    *("capture_into", "prefix_streams", "end_lines", "attach_log_handlers_quickly"),
    *("manage_fixtures_quickly", "expect_plugins", "use_config", "set_root", "set_location"),
    *("seed_everything", "show_freed_tensors"),
)
ORDER = RunItem("a.py::test_a", "/here/a.py", ("b.py::test_b", "/here/b.py"), "/shared", None)
STATUS = RankStatus("", "", case="n=1")


class Session(RankSession):
    """A session whose parts note what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.calls = calls = Mock()
        for name in PARTS:
            monkeypatch.setattr(module, name, getattr(calls, name))
        monkeypatch.setattr(module, "count_collectives", lambda: 7)
        monkeypatch.setattr(module, "count_groups", lambda: 3)
        monkeypatch.setattr(module, "time", SimpleNamespace(time_ns=lambda: 5))
        given = SessionSpec(
            ("-q",), "/", (), (), {}, {"workerid": "master"}, True, rootdir="/root", to_rewrite=("a",)
        )
        spec = RankSpec(1, WorldKey(2, "gloo", "cpu"), replace(given, **changes), 11, "/private", "/base")
        connection: Any = object()
        super().__init__(spec, connection)
        assert calls.Rank.mock_calls == [call(spec, connection)]
        self.activity = self.rank.status.activity = Activity("idle", item=4, case="n=1", count="1 of 2")  # type: ignore[misc]
        rank: Any = self.rank
        rank.status.collectives.return_value = STATUS
        self._collection.errors = {}
        self.found: dict[str, Any] = {}
        collection: Any = self._collection
        collection.find.side_effect = lambda session, nodeid, path, functions: self.found.get(nodeid)
        self.options = {"check_collectives": True}
        hook = calls.hook
        for name in ("begin", "item"):
            getattr(hook, f"pytest_ranks_{name}").return_value = None
        config = SimpleNamespace(hook=hook, getoption=self.options.__getitem__)
        self._config: Any = config
        calls.reset_mock()

    def names(self) -> list[str]:
        return [name.removeprefix("Rank().") for name, *_ in self.calls.mock_calls]

    def sent(self) -> list[Any]:
        wire: Any = self.rank.wire
        return [each.args[0] for each in wire.send.call_args_list]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(monkeypatch)


# The start and the end


def test_the_parts_of_a_session_know_each_other(made: Session) -> None:
    calls = made.calls
    assert made.__name__ == RANK_PLUGIN
    assert (made.order, made.started) == (None, False)
    assert made.world is made.rank.world
    assert made._state is made._guards.state
    assert made.rank.adopt_state is made._state.adopt
    RankSession(made._spec, object())  # type: ignore[arg-type]
    assert calls.RankCollection.call_args == call("/root")
    assert calls.CrashReports.call_args == call("/private/rank-1.stacks")
    assert calls.ItemGuards.call_args == call(made.rank, made._crash_reports)
    assert calls.Standing.call_args == call(made._spec)
    assert calls.RankReporter.call_args == call(made.rank, made._standing, made._guards)
    config = Mock()
    made.pytest_configure(config)
    plugins = [each.args[0] for each in config.pluginmanager.register.call_args_list]
    assert plugins == [made._collection, made._guards, made._reporter]


def test_a_session_answers_and_meets_the_others(made: Session) -> None:
    made.join()
    assert made.names() == ["gc.enable", "CrashReports().enable", "join"]


class Ended(BaseException):
    """The process has ended with this status."""


@pytest.fixture
def main(made: Session, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `pytest.main` that a session runs; it comes to the first item."""
    mock = Mock(return_value=2)
    mock.side_effect = lambda args, plugins: setattr(made, "started", True)
    monkeypatch.setattr(module.pytest, "main", mock)

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    return mock


def run(made: Session, names_lines: bool = True) -> None:
    with pytest.raises(Ended) as ended:
        made.run(names_lines=names_lines)
    assert ended.value.args == (0,)


def test_a_session_runs_over_the_arguments_of_the_user(made: Session, main: Any) -> None:
    logger = logging.getLogger("c10d-NullHandler-default")
    logger.disabled = False
    run(made)
    main.assert_called_once_with(["-q"], plugins=[made])
    assert made.calls.mock_calls == [
        call.capture_into("/private/rank-1.captured"),
        call.attach_log_handlers_quickly(),
        call.manage_fixtures_quickly(),
        call.expect_plugins(("a",)),
        call.use_config(module._CONFIG),
        call.set_root(Path("/root"), None),
        call.Rank().group.leave(),
    ]
    assert logger.disabled


def test_the_config_has_the_plugin_and_its_features_already() -> None:
    manager = module._CONFIG.pluginmanager
    names = [name for name, _ in manager.list_name_plugin()]
    assert (
        names.index("terminal")
        < names.index("lockstep.plugin")
        < names.index("lockstep.features.leaks.plugin")
    )
    assert manager.get_plugin("pytestconfig") is module._CONFIG


def test_a_session_makes_its_config_where_the_plugin_has_another_name(made: Session, main: Any) -> None:
    made._spec = replace(made._spec, session=replace(made._spec.session, renames_plugin=True))
    run(made)
    assert not made.calls.use_config.called
    main.assert_called_once_with(["-q"], plugins=[made])


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("names_lines", [True, False])
def test_lines_have_names_where_they_are_not_captured(
    made: Session, main: Any, captures: bool, names_lines: bool
) -> None:
    made._spec = replace(made._spec, session=replace(made._spec.session, captures=captures))
    run(made, names_lines)
    has_names = names_lines and not captures
    assert made.calls.prefix_streams.called == has_names
    if has_names:
        (name,) = made.calls.prefix_streams.call_args.args
        made.world.rank = 3
        assert name() == "rank 3"


def test_the_ini_file_of_the_controller_is_used(made: Session, main: Any) -> None:
    made._spec = replace(made._spec, session=replace(made._spec.session, inifile="/root/a.ini"))
    run(made)
    made.calls.set_root.assert_called_once_with(Path("/root"), Path("/root/a.ini"))


def test_a_session_that_does_not_start_says_why(made: Session, main: Any) -> None:
    main.side_effect = None
    run(made)
    assert made.sent() == [StartFailed("pytest ended with status 2 before it ran a test")]
    main.side_effect = SystemExit("of a conftest")
    with pytest.raises(SystemExit):
        made.run(names_lines=True)
    text = made.sent()[1].text
    assert text.startswith("it raised before it ran a test\n")
    assert text.endswith("SystemExit: of a conftest")
    made.started = True
    with pytest.raises(SystemExit):
        made.run(names_lines=True)
    assert len(made.sent()) == 2


def test_streams_are_flushed_though_one_is_closed(
    made: Session, main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = Mock(), Mock()
    out.flush.side_effect = ValueError("closed")
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=out, stderr=err))
    run(made)
    out.flush.assert_called_once_with()
    err.flush.assert_called_once_with()


# Hooks


@pytest.mark.parametrize(("before", "after"), [("sys", "tee-sys"), ("fd", "fd"), (None, None)])
def test_capture_into_memory_writes_to_the_log_as_well(
    made: Session, before: str | None, after: str | None
) -> None:
    options = SimpleNamespace() if before is None else SimpleNamespace(capture=before)
    config: Any = SimpleNamespace(known_args_namespace=options)
    hook = made.pytest_load_initial_conftests(config)
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send("result")
    assert end.value.value == "result"
    assert getattr(options, "capture", None) == after


def test_a_rank_does_nothing_that_the_controller_does_once(made: Session) -> None:
    options = SimpleNamespace(maxfail=1, keyword="a", xmlpath="x", dist="load", other=5, basetemp=None)
    blocked: list[str] = []
    manager = SimpleNamespace(set_blocked=blocked.append)
    config: Any = SimpleNamespace(option=options, hook="the hooks", pluginmanager=manager)
    hook = made.pytest_cmdline_main(config)
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send("result")
    assert end.value.value == "result"
    assert vars(options) == {
        "maxfail": 0,
        "keyword": "",
        "xmlpath": None,
        "dist": "no",
        "other": 5,
        "basetemp": "/base",
    }
    assert made._config is config
    assert made.rank.hook == "the hooks"
    assert blocked == ["terminal", "terminalreporter"]
    assert config.workerinput == {"workerid": "gw1", "workercount": 2}
    assert config.workeroutput == {}


def test_nothing_is_collected_as_a_session_starts(made: Session) -> None:
    assert made.pytest_collection() is True
    made.pytest_sessionstart()
    assert made.names() == ["show_freed_tensors"]


@pytest.mark.parametrize("has_idle", [True, False])
def test_orders_are_run_until_the_session_is_closed(
    made: Session, monkeypatch: pytest.MonkeyPatch, has_idle: bool
) -> None:
    ran: list[Any] = []
    of_pytest = Mock()
    hook = of_pytest.config.hook.pytest_ranks_idle
    hook.get_hookimpls.return_value = ["one"] if has_idle else []
    monkeypatch.setattr(made, "_run", lambda *given: ran.append((given, made.order, made.started)))
    wire: Any = made.rank.wire
    other = replace(ORDER, path="b.py")
    wire.next_order.side_effect = [ORDER, Interrupt(), other, Close()]
    assert made.pytest_runtestloop(of_pytest) is True
    assert ran == [((of_pytest, each), each, True) for each in (ORDER, other)]
    assert made.names()[:3] == ["ItemGuards().state.start", "Standing().await_item", "wire.send"]
    assert made.sent() == [Ready()]
    assert wire.next_order.call_args_list == [call(hook if has_idle else None)] * 4


# One item


def run_item(made: Session, order: RunItem = ORDER) -> list[Any]:
    """Run an item; return what was sent."""
    made.rank.group.stands.return_value = True  # type: ignore[attr-defined]
    made._state.is_restored = True
    made.calls.reset_mock()
    of_pytest: Any = "the session"
    made._run(of_pytest, order)
    return made.sent()


DONE = Finished(True, 7, 3, replace(STATUS, state="idle"), {})


def test_an_item_is_run_in_its_steps(made: Session) -> None:
    item, following = Mock(), Mock()
    made.found = {"a.py::test_a": item, "b.py::test_b": following}
    during: list[Any] = []
    hook = made._config.hook
    hook.pytest_ranks_run_item.side_effect = lambda **_: during.append(replace(made.activity))
    assert run_item(made) == [Collecting("/here/a.py"), ItemStarted(), DONE]
    device = made.rank.group.device
    assert [each for each in made.calls.mock_calls if each[0] != "RankCollection().find"] == [
        call.ItemGuards().state.end_groups(),
        call.hook.pytest_ranks_begin(order=ORDER),
        call.Rank().group.begin_item(),
        call.Rank().wire.send(Collecting("/here/a.py")),
        call.Rank().wire.send(ItemStarted()),
        call.Rank().world.enter_test("/shared"),
        call.RankReporter().begin(item),
        call.seed_everything(11, device),
        call.hook.pytest_ranks_run_item(item=item, nextitem=following, order=ORDER),
        call.Rank().status.collectives(),
        call.Rank().group.stands(),
        call.hook.pytest_ranks_finished(ending=Ending(True)),
        call.Rank().wire.send(DONE),
        call.Standing().await_item(),
    ]
    (activity,) = during
    assert (activity.state, activity.began, activity.meeting, activity.item) == ("runs", 5, None, 5)
    activity = made.activity
    assert (activity.state, activity.case, activity.count) == ("idle", "", "")


def test_features_change_orders_items_and_endings(made: Session) -> None:
    item, other = Mock(), Mock()
    location = ("a.py", 3, "test_a")
    changed = replace(ORDER, nodeid="changed", location=location, parts={"mine": 1}, next_item=None)
    made.found = {"changed": item}
    hook = made._config.hook
    hook.pytest_ranks_begin.return_value = changed
    hook.pytest_ranks_item.return_value = other

    def finish(ending: Ending) -> None:
        ending.usable, ending.parts["mine"] = False, 2

    hook.pytest_ranks_finished.side_effect = finish
    made.options["check_collectives"] = False
    assert run_item(made)[-1] == Finished(False, 7, 3, None, {"mine": 2})
    hook.pytest_ranks_item.assert_called_once_with(item=item, order=changed)
    made.calls.set_location.assert_called_once_with(other, location)
    made.calls.RankReporter().begin.assert_called_once_with(other)
    hook.pytest_ranks_run_item.assert_called_once_with(item=other, nextitem=None, order=changed)
    hook.pytest_ranks_item.return_value = None
    run_item(made)
    made.calls.set_location.assert_called_once_with(item, location)


def test_without_parts_or_location_an_item_is_as_collected(made: Session) -> None:
    made.found = {"a.py::test_a": Mock()}
    run_item(made)
    assert not made._config.hook.pytest_ranks_item.called
    assert not made.calls.set_location.called


def test_a_missing_item_is_reported_and_the_group_aborted(made: Session) -> None:
    assert run_item(made) == [Collecting("/here/a.py"), ItemStarted(), DONE]
    names = made.names()
    start = names.index("RankCollection().report_missing")
    assert names[start : start + 3] == [
        *("RankCollection().report_missing", "RankReporter().send", "group.abort"),
    ]
    report_missing: Any = made._collection.report_missing
    report_missing.assert_called_once_with(ORDER, "the session")
    send: Any = made._reporter.send
    send.assert_called_once_with(report_missing.return_value)
    assert not made._config.hook.pytest_ranks_run_item.called
    assert not made.calls.seed_everything.called


@pytest.mark.parametrize(("stands", "restored"), [(True, False), (False, True), (False, False)])
def test_a_rank_is_usable_with_its_group_and_its_state(
    made: Session, monkeypatch: pytest.MonkeyPatch, stands: bool, restored: bool
) -> None:
    group: Any = made.rank.group
    group.stands.return_value, made._state.is_restored = stands, restored
    of_pytest: Any = None
    made._run(of_pytest, ORDER)
    assert made.sent()[-1].usable is False


@pytest.mark.parametrize("captures", [True, False])
def test_lines_that_are_not_captured_end_with_the_item(
    monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    made = Session(monkeypatch, captures=captures)
    run_item(made)
    assert made.calls.end_lines.called is not captures


def test_files_are_collected_once_and_the_controller_hears_of_it(made: Session) -> None:
    first, second = object(), object()
    made.found = {"a.py::test_a": first, "b.py::test_b": second}
    order = replace(ORDER, functions={"a.py::test_a": frozenset({"test_a"})})
    of_pytest: Any = "the session"
    assert made._collect(of_pytest, order) == [first, second]
    find: Any = made._collection.find
    assert find.call_args_list == [
        call("the session", "a.py::test_a", "/here/a.py", frozenset({"test_a"})),
        call("the session", "b.py::test_b", "/here/b.py", None),
    ]
    assert made.sent() == [Collecting("/here/a.py"), ItemStarted()]
    made._collection.errors["/here/a.py"] = ""
    assert made._collect(of_pytest, replace(order, next_item=None)) == [first, None]
    assert len(made.sent()) == 2
    made._collect(of_pytest, order)
    assert made.sent()[2:] == [Collecting("/here/b.py"), ItemStarted()]
    made._collection.errors["/here/b.py"] = "broken"
    assert made._collect(of_pytest, order) == [first, second]
    assert len(made.sent()) == 4


# Errors past pytest


def item_that_raises(error: BaseException | None) -> Any:
    protocol = Mock(side_effect=error)
    return SimpleNamespace(
        nodeid="a.py::test_a",
        location=("a.py", 3, "test_a"),
        ihook=SimpleNamespace(pytest_runtest_protocol=protocol),
        repr_failure=lambda excinfo: f"repr of {excinfo.value!r}",
    )


def test_an_item_that_runs_has_no_report_of_the_session(made: Session) -> None:
    item = item_that_raises(None)
    assert made.pytest_ranks_run_item(item, None) is True
    item.ihook.pytest_runtest_protocol.assert_called_once_with(item=item, nextitem=None)
    assert made.names() == []


@pytest.mark.parametrize(("over", "when"), [(0, "setup"), (1, "call"), (2, "teardown"), (3, "teardown")])
def test_what_is_raised_past_pytest_fails_the_phase(made: Session, over: int, when: str) -> None:
    made._reporter.phases_over = over
    rank: Any = made.rank
    rank.wire.is_interrupted = over == 1
    error = KeyboardInterrupt("by a test") if over != 1 else ValueError("of a hook")
    item = item_that_raises(error)
    assert made.pytest_ranks_run_item(item, None) is True
    log: Any = made._reporter.pytest_runtest_logreport
    (report,) = log.call_args.args
    assert (report.nodeid, report.location, report.outcome) == (item.nodeid, item.location, "failed")
    assert (report.when, report.longrepr) == (when, f"repr of {error!r}")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.exit.Exception("over")])
def test_an_interrupt_of_the_controller_ends_the_session(made: Session, error: BaseException) -> None:
    rank: Any = made.rank
    rank.wire.is_interrupted = True
    with pytest.raises(type(error)):
        made.pytest_ranks_run_item(item_that_raises(error), None)
    assert made.names() == []


def test_a_failure_that_has_no_representation_is_its_text() -> None:
    item: Any = SimpleNamespace(repr_failure=Mock(side_effect=KeyboardInterrupt()))
    with pytest.raises(ValueError) as raised:
        pytest.approx(1.0, abs=-1.0) == 2.0  # noqa: B015
    assert str(module._represent(item, raised.value)).endswith(f"E   ValueError: {raised.value}")
