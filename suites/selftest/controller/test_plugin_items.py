"""The controller without processes: the orders that it sends to worlds, and its runs of items."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller import plugin
from lockstep.controller.requests import REQUEST, Refusal, Request
from lockstep.exceptions import LaunchError, WorldError
from lockstep.specification import WorldKey
from suites.selftest.controller.stand_ins import (
    KEY,
    REQUESTED,
    Hooks,
    Server,
    Worlds,
    ended,
    in_session,
    item_named,
)

# Orders


def test_an_order_says_what_runs_and_what_comes_next(controller: Any, hooks: Hooks, tmp_path: Path) -> None:
    def add(item: Any, request: Request, parts: dict[str, Any]) -> None:
        parts["feature"] = item.nodeid

    hooks.answers["pytest_ranks_order"] = add
    request = Request(KEY, False, 60.0, {"x": 1})
    first = item_named(controller, "test_first", request)
    plain = item_named(controller, "test_plain", None)
    other = item_named(controller, "test_other", Request(WorldKey(3, "gloo", "cpu"), False, 60.0))
    last = item_named(controller, "test_" + "y" * 50, request, "test_z.py")
    in_session(controller, first, plain, other, last)
    controller._functions = {first.path: frozenset({"test_first"})}
    order = controller._order(first, request, plain)
    assert (order.nodeid, order.path) == ("test_x.py::test_first", str(tmp_path / "test_x.py"))
    assert order.next_item == (last.nodeid, str(tmp_path / "test_z.py"))
    assert order.shared_tmp_path == f"{tmp_path}/base/shared/0-test_first"
    assert order.location == first.location
    assert order.functions == {first.nodeid: frozenset({"test_first"})}
    assert order.parts == {"x": 1, "feature": first.nodeid}
    controller._functions[last.path] = frozenset({"test_y"})
    assert controller._order(first, request, plain).functions.keys() == {first.nodeid, last.nodeid}
    assert request.parts == {"x": 1}
    order = controller._order(last, request, None)
    assert order.next_item is None
    assert order.shared_tmp_path == f"{tmp_path}/base/shared/2-test_{'y' * 33}"
    assert controller._order(first, Request(KEY, True, 60.0, {"x": 1}), plain).next_item is None


def test_a_directory_that_hosts_share_is_a_features(controller: Any, hooks: Hooks, tmp_path: Path) -> None:
    item = item_named(controller, "test_a")
    del item.originalname
    spread = Request(WorldKey(2, "gloo", "cpu", spread=(1, 1)), False, 60.0)  # type: ignore[arg-type]
    assert controller._shared_directory(item, spread) == f"{tmp_path}/base/shared/0-test"
    hooks.answers["pytest_ranks_shared_directory"] = ""
    assert controller._shared_directory(item, spread) == ""
    hooks.answers["pytest_ranks_shared_directory"] = "/all"
    assert controller._shared_directory(item, spread) == "/all/2-test"
    assert controller._shared_directory(item, REQUESTED) == f"{tmp_path}/base/shared/3-test"


def test_the_next_item_of_a_world_is_one_that_shares_its_fixtures(controller: Any) -> None:
    fresh = item_named(controller, "fresh", Request(KEY, True, 60.0))
    refused = item_named(controller, "refused", Refusal("skipped", "no"))
    same = item_named(controller, "same")
    parted = item_named(controller, "parted", Request(KEY, False, 60.0, {"x": 1}))
    in_session(controller, fresh, refused, same, parted)
    assert controller._next_of_world(REQUESTED, None) is None
    assert controller._next_of_world(REQUESTED, fresh) is same
    assert controller._next_of_world(REQUESTED, parted) is None
    assert controller._next_of_world(REQUESTED, same) is same
    controller._config.workerinput = {}
    assert controller._next_of_world(REQUESTED, fresh) is None
    assert controller._next_of_world(REQUESTED, same) is same


def test_the_position_of_an_item_follows_a_plugin_that_changes_the_order(controller: Any) -> None:
    one, two, three = (item_named(controller, name) for name in ("one", "two", "three"))
    in_session(controller, one, two, three)
    assert [controller._position(each) for each in (one, two, three)] == [0, 1, 2]
    items = one.session.items
    items.reverse()
    assert [controller._position(each) for each in (one, two, three)] == [2, 1, 0]
    items.remove(one)
    assert [controller._position(each) for each in (one, two, three)] == [2, 1, 0]
    items.remove(two)
    assert [controller._position(each) for each in (two, three)] == [1, 0]


def test_functions_of_a_file_are_known_if_all_its_items_are_plain(controller: Any, tmp_path: Path) -> None:
    def function(path: str, name: str, **module: object) -> Any:
        made = pytest.Function.__new__(pytest.Function)
        made.path, made.originalname = tmp_path / path, name  # type: ignore[misc]
        made.parent = SimpleNamespace(obj=SimpleNamespace(**module))  # type: ignore[assignment]
        return made

    items = [
        function("a.py", "test_a", test_a=1),
        function("a.py", "test_b", test_b=1),
        function("b.py", "test_a", test_a=1),
        function("b.py", "renamed", test_a=1),
        function("c.py", "test_c", test_c=1),
        item_named(controller, "of a plugin", path="c.py"),
    ]
    controller.pytest_collection_finish(SimpleNamespace(items=items))
    assert controller._functions == {tmp_path / "a.py": frozenset({"test_a", "test_b"})}


# Runs


@pytest.mark.parametrize(
    ("outcome", "fresh", "then"),
    [
        (ended(), False, "give back True"),
        (ended(), True, "give back False"),
        (ended(is_clean=False), False, "give back False"),
        (ended(is_clean=False, finished=1), False, "discard"),
    ],
)
def test_a_world_is_kept_after_a_clean_run(controller: Any, outcome: Any, fresh: bool, then: str) -> None:
    controller._worlds = worlds = Worlds(outcome)
    item, request = item_named(controller, "test_a"), Request(KEY, fresh, 7.0)
    order = controller._order(item, request, None)
    assert controller._run_order(item, request, order) is outcome
    assert worlds.said == [f"take 2 {fresh}", then]
    (run,) = worlds.runs
    assert (run.order, run._hook) == (order, controller._config.hook)
    assert controller._last_items == {"world-0": item}


@pytest.mark.parametrize("error", [WorldError("lost"), pytest.fail.Exception("late")])
def test_a_world_that_cannot_run_an_item_is_discarded(controller: Any, error: BaseException) -> None:
    controller._worlds = worlds = Worlds(error)
    item = item_named(controller, "test_a")
    assert controller._run(item, REQUESTED, None) == Refusal("failed", str(error))
    assert worlds.said == ["take 2 False", "discard"]


def test_a_world_that_does_not_start_is_named(controller: Any, server: Server) -> None:
    def take(key: WorldKey, *, fresh: bool) -> Any:
        raise LaunchError("no memory")

    controller._worlds = SimpleNamespace(take=take)
    item = item_named(controller, "test_a")
    why = f"no world of {KEY}: no memory"
    assert controller._run(item, REQUESTED, None) == Refusal("failed", why)
    assert server.said == []


def test_the_code_of_hosts_is_compared_before_a_spread_world_runs(controller: Any, server: Server) -> None:
    controller._worlds = Worlds(ended())
    key = WorldKey(2, "gloo", "cpu", spread=(1, 1))  # type: ignore[arg-type]
    controller._run(item_named(controller, "test_a"), Request(key, False, 60.0), None)
    assert server.said == [f"check test_x.py {controller._config.rootpath.name} (1, 1)"]


def test_features_run_an_item_before_and_again(controller: Any, hooks: Hooks) -> None:
    item, first, second = item_named(controller, "test_a"), ended(is_clean=False), ended()
    controller._worlds = worlds = Worlds(first, second)
    hooks.answers["pytest_ranks_again"] = lambda item, order, outcome, run: run(order)
    assert controller._run(item, REQUESTED, None) is second
    assert hooks.asked["pytest_ranks_again"]["outcome"] is first
    controller._worlds = Worlds(first)
    hooks.answers["pytest_ranks_again"] = None
    assert controller._run(item, REQUESTED, None) is first
    controller._worlds = Worlds(second)
    hooks.asked.clear()
    assert controller._run(item, REQUESTED, None) is second
    assert "pytest_ranks_again" not in hooks.asked
    hooks.answers["pytest_ranks_before"] = reports = [object()]
    assert controller._run(item, REQUESTED, None) is reports
    assert len(worlds.runs) == 2


def test_the_reports_of_an_item_are_those_of_its_last_run(
    controller: Any, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on: list[Any] = []
    merged: list[Any] = []
    monkeypatch.setattr(plugin, "pass_on_warnings", lambda item, outcome: passed_on.append(outcome))
    monkeypatch.setattr(plugin, "merge", lambda *given: merged.append(given) or ["merged"])
    item, outcome, last = item_named(controller, "test_a"), ended(), ended()
    assert controller._report(item, outcome) == ["merged"]
    assert passed_on == []
    last.ranks = (SimpleNamespace(warnings=()), SimpleNamespace(warnings=("w",)))
    outcome.last_run = last
    controller._config.option.world_seed = 9
    assert controller._report(item, outcome) == ["merged"]
    assert passed_on == [last]
    of, item_of_it, rerun, seed = merged[-1]
    assert (of, item_of_it, seed) == (outcome, item, 9)
    assert hooks.asked["pytest_ranks_reported"] == {"item": item, "outcome": outcome, "reports": ["merged"]}
    controller._config.hook.answers["pytest_ranks_repeated_options"] = []
    assert rerun().startswith("pytest test_x.py::test_")
    given = [pytest.TestReport("id", item.location, {}, "passed", None, "call")]
    assert controller._report(item, given) is given
    assert [each.outcome for each in controller._report(item, Refusal("skipped", "no"))] == [
        "skipped",
        "passed",
    ]


def test_an_item_with_a_request_is_run_and_reported_here(controller: Any, hooks: Hooks) -> None:
    plain = item_named(controller, "plain", None)
    item = item_named(controller, "test_a")
    in_session(controller, plain, item)
    assert controller.pytest_runtest_protocol(plain, item) is None
    assert (controller._current, controller._next) == (plain, item)
    hooks.answers["pytest_ranks_before"] = given = [SimpleNamespace(failed=False)]
    logged: list[Any] = []
    item.ihook.answers["pytest_runtest_logreport"] = lambda report: logged.append(report)
    assert controller.pytest_runtest_protocol(item, None) is True
    where = {"nodeid": item.nodeid, "location": item.location}
    assert item.ihook.asked["pytest_runtest_logstart"] == where
    assert item.ihook.asked["pytest_runtest_logfinish"] == where
    assert logged == given
    hooks.answers["pytest_ranks_run_and_log"] = lambda item, nextitem, run: run() == given
    item.ihook.asked.clear()
    assert controller.pytest_runtest_protocol(item, None) is True
    assert item.ihook.asked == {}


def test_what_fails_in_a_tear_down_here_is_added_to_the_reports(controller: Any, hooks: Hooks) -> None:
    item = item_named(controller, "test_a", Refusal("skipped", "no"))
    in_session(controller, item)
    item.session._setupstate.teardown_exact = lambda nextitem: [].pop()
    item._repr_failure_py = item.repr_failure = lambda error, *_, **__: str(error.value)
    item.user_properties, item._report_sections = [], []
    reports = controller._run_and_merge(item, item.stash[REQUEST], None)
    assert [report.outcome for report in reports] == ["skipped", "failed"]
    assert reports[1].longrepr == "pop from empty list"


def test_the_line_of_the_next_item_is_found_while_ranks_run(controller: Any) -> None:
    controller.pytest_ranks_run_begins()
    found: list[None] = []

    class Next:
        @property
        def location(self) -> object:
            found.append(None)
            raise ValueError

    controller._next = Next()
    controller.pytest_ranks_run_begins()
    assert found == [None]


def test_a_run_in_an_items_place_is_named_and_has_parts(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller._worlds = worlds = Worlds(outcome := ended())
    monkeypatch.setattr(controller, "_report", lambda item, outcome: [item, outcome])
    item = item_named(controller, "test_a")
    in_session(controller, item)
    request = Request(KEY, False, 60.0, {"x": 1, "y": 1})
    shared, reports = controller.prepare(item, request, None, {"y": 2})
    assert shared == f"{controller._config.rootpath}/base/shared/0-test_a"
    assert reports == [item, outcome]
    assert worlds.runs[0].order.parts == {"x": 1, "y": 2}
    assert worlds.runs[0].order.next_item is None
