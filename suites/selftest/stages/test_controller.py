"""Unit tests of stages in the controller: for which tests one runs, and what a test reports that has none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.backends.device import Device
from lockstep.controller.requests import Refusal, Request
from lockstep.exceptions import WorldError
from lockstep.features.stages import controller
from lockstep.features.stages import plugin as plugins
from lockstep.features.stages.controller import Stages, Stopped
from lockstep.features.stages.pytest_internals import fixtures_below
from lockstep.features.stages.stage import FEATURE, Scope, Stage, _find_path, find_stage, stage
from lockstep.hookspecs import ONLY_ON_RANKS
from lockstep.marker import RanksMark
from lockstep.protocol import Preparation
from lockstep.specification import WorldKey

CLASS, MODULE, PACKAGE, SESSION = (object() for _ in range(4))
CPU = Device("cpu").type


def body() -> None: ...


def an_item(
    fixtures: dict[str, tuple[Any, tuple[str, ...]]],
    parents: tuple[object, object, object] = (CLASS, MODULE, PACKAGE),
    **fields: Any,
) -> Any:
    """Return an item.

    Args:
        fixtures: the stage, or None, of each by name, and the names that it requests.
        parents: its class, module and package.
    """
    definitions = {
        name: [SimpleNamespace(func=None if of is None else _find_path(of), argnames=requested)]
        for name, (of, requested) in fixtures.items()
    }
    kinds = dict(zip((pytest.Class, pytest.Module, pytest.Package), parents, strict=True))
    nothing: dict[str, object] = {}
    usual = {"nodeid": "a.py::b", "location": ("a.py", 3, "b"), "keywords": nothing, "session": SESSION}
    info = SimpleNamespace(name2fixturedefs=definitions)
    return _Item(_fixtureinfo=info, getparent=kinds.get, **(usual | fields))


class _Item(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def a_stage(scope: Scope = "function", ranks: int = 4) -> Stage:
    return Stage(body, ranks, scope)


class Runs:
    """Runs of stages: each is written down, and leaves a directory of its own."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.report = SimpleNamespace(passed=True)
        self.error: BaseException | None = None

    def __call__(self, item: Any, request: Any, preparation: Preparation, parts: Any) -> tuple[str, Any]:
        self.done.append((request.key.size, preparation.name, parts[FEATURE]))
        if self.error:
            raise self.error
        return f"/{len(self.done)}", [SimpleNamespace(passed=True), self.report]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    def request_of(item: Any, size: int) -> Request:
        return Request(WorldKey(size, "gloo", CPU), False, 1.0)

    monkeypatch.setattr(controller, "request_of", request_of)
    return Runs()


@pytest.fixture
def stages(runs: Runs) -> Stages:
    return Stages(runs)  # type: ignore[arg-type]


def before(stages: Stages, item: Any, *names: str) -> Any:
    """Return what a test with stages gets, or its reports where one has stopped it."""
    stages.names[item] = names
    reports = stages.pytest_ranks_before(item)
    parts: dict[str, Any] = {}
    stages.pytest_ranks_order(item, parts)
    assert reports is None or parts == {}
    return parts if reports is None else reports


def test_a_test_gets_what_its_stages_left_in_their_order(stages: Stages, runs: Runs) -> None:
    item = an_item({"a": (a_stage(), ()), "b": (a_stage(ranks=3), ("a",))})
    assert before(stages, item, "a", "b") == {FEATURE: (("a", "/1"), ("b", "/2"))}
    assert runs.done == [(4, "a", ()), (3, "b", (("a", "/1"),))]
    assert before(stages, an_item({})) == {}


OTHERS: dict[Scope, tuple[object, object, object]] = {
    "class": (object(), MODULE, PACKAGE),
    "module": (CLASS, object(), PACKAGE),
    "package": (CLASS, MODULE, object()),
}


@pytest.mark.parametrize("scope", ["function", "class", "module", "package", "session"])
def test_a_stage_runs_once_for_its_scope(stages: Stages, runs: Runs, scope: Scope) -> None:
    fixtures: Any = {"a": (a_stage(scope), ())}
    first = before(stages, an_item(fixtures), "a")
    same = before(stages, an_item(fixtures), "a")
    assert (same == first) is (scope != "function")
    for other, parents in OTHERS.items():
        elsewhere = before(stages, an_item(fixtures, parents), "a")
        assert (elsewhere == first) is (scope not in ("function", other))


def test_a_stage_of_scope_class_runs_once_for_the_functions_of_a_module(stages: Stages) -> None:
    fixtures: Any = {"a": (a_stage("class"), ())}
    first = before(stages, an_item(fixtures, (None, MODULE, PACKAGE)), "a")
    assert before(stages, an_item(fixtures, (None, MODULE, PACKAGE)), "a") == first
    assert before(stages, an_item(fixtures, (None, object(), PACKAGE)), "a") != first


def test_a_stage_runs_once_for_each_value_of_parameters_that_it_uses(stages: Stages, runs: Runs) -> None:
    fixtures: Any = {"a": (a_stage("session"), ("letter",)), "letter": (None, ()), "b": (None, ())}
    x, y = object(), object()

    def of(letter: object, other: object) -> Any:
        return an_item(fixtures, callspec=SimpleNamespace(params={"letter": letter, "b": other}))

    first = before(stages, of(x, x), "a")
    assert before(stages, of(x, y), "a") == first
    assert before(stages, of(y, x), "a") != first


def test_a_stage_runs_again_behind_another_one(stages: Stages) -> None:
    fixtures: Any = {"a": (a_stage(), ()), "b": (a_stage("session"), ("a",))}
    first, second = (before(stages, an_item(fixtures), "a", "b")[FEATURE] for _ in range(2))
    assert dict(first)["b"] != dict(second)["b"]


def test_a_stage_that_failed_runs_again_only_where_its_test_is_repeated(stages: Stages, runs: Runs) -> None:
    fixtures: Any = {"a": (a_stage("module"), ())}
    runs.error = WorldError("gone")
    for item in (an_item(fixtures), an_item(fixtures), an_item(fixtures, execution_count=1)):
        setup, teardown = before(stages, item, "a")
        assert (setup.when, setup.outcome) == ("setup", "failed")
        assert setup.longrepr == "in the stage `a`, on 4 ranks before the test: gone"
        assert (teardown.when, teardown.outcome) == ("teardown", "passed")
    assert len(runs.done) == 1
    runs.error = None
    assert before(stages, an_item(fixtures, execution_count=2), "a") == {FEATURE: (("a", "/2"),)}
    assert before(stages, an_item(fixtures, execution_count=2), "a") == {FEATURE: (("a", "/2"),)}


def test_a_deadline_of_a_plugin_in_a_stage_is_one_of_the_stage(stages: Stages, runs: Runs) -> None:
    runs.error = pytest.fail.Exception("late")
    (setup, _) = before(stages, an_item({"a": (a_stage(ranks=1), ())}), "a")
    assert setup.longrepr == "in the stage `a`, on 1 rank before the test: late"


def test_the_report_of_a_stage_that_did_not_pass_is_that_of_the_set_up(stages: Stages, runs: Runs) -> None:
    kept: dict[str, Any] = {"sections": [("Captured stdout", "x")], "duration": 3.0, "wasxfail": "yet"}
    own = {"passed": False, "outcome": "skipped", "longrepr": "nothing", "when": "call", "other": 1}
    runs.report = SimpleNamespace(**own, **kept)
    item = an_item({"a": (a_stage(), ()), "b": (a_stage(), ())})
    setup, teardown = before(stages, item, "a", "b")
    assert (setup.outcome, setup.longrepr, setup.when) == ("skipped", "nothing", "setup")
    assert {name: getattr(setup, name) for name in kept} == kept
    assert not hasattr(setup, "other")
    assert teardown.passed
    assert len(runs.done) == 1
    (without, _) = Stopped("failed", "why").reports(item)
    assert (without.outcome, without.longrepr, without.sections) == ("failed", "why", [])


def test_a_test_whose_stage_has_no_world_is_refused_for_it(
    stages: Stages, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "request_of", lambda item, size: Refusal("skipped", "need 4 GPUs"))
    (setup, _) = before(stages, an_item({"a": (a_stage(), ())}, path="a.py"), "a")
    why = "Skipped: in the stage `a`, on 4 ranks before the test: need 4 GPUs"
    assert (setup.outcome, setup.longrepr) == ("skipped", ("a.py", 4, why))
    assert runs.done == []


# The stages that a test requests


class Plugins:
    """Plugins of a session."""

    def __init__(self) -> None:
        self.registered: list[object] = []
        self.register = self.registered.append

    def get_plugin(self, name: str) -> Any:
        return SimpleNamespace(prepare=None)


def request_for(item: Any, backend: str = "gloo", given: str | None = None) -> Refusal | None:
    request = Request(WorldKey(2, backend, CPU), False, 1.0)
    return plugins.pytest_ranks_request(item, RanksMark((2,), backend=given), request)


def test_tests_with_stages_share_what_runs_them() -> None:
    manager, stash = Plugins(), pytest.Stash()
    config = SimpleNamespace(stash=stash, pluginmanager=manager)
    fixtures: Any = {"a": (a_stage(), ("b", "c")), "b": (a_stage(), ()), "c": (None, ())}
    first, second = (
        an_item(fixtures, fixturenames=names, config=config) for names in (["c", "a", "b"], ["b"])
    )
    assert request_for(an_item(fixtures, fixturenames=["c"], config=config)) is None
    assert manager.registered == []
    assert request_for(first) is request_for(second) is None
    (stages,) = manager.registered
    assert isinstance(stages, Stages)
    assert stages.names == {first: ("b", "a"), second: ("b",)}
    assert request_for(SimpleNamespace()) is None


@pytest.mark.parametrize(("given", "outcome"), [(None, "skipped"), ("fake", "failed")])
def test_a_fake_world_has_no_stage_before_it(given: str | None, outcome: str) -> None:
    item = an_item({"a": (a_stage(), ())}, fixturenames=["a"])
    why = "the test has a stage (`a`), and a fake world is one process that receives nothing"
    assert request_for(item, "fake", given) == Refusal(outcome, why)  # type: ignore[arg-type]


def test_fixtures_are_behind_those_that_they_request() -> None:
    item = an_item({"a": (None, ("b", "c")), "b": (None, ("d", "a")), "c": (None, ()), "d": (None, ())})
    assert fixtures_below(item, ["c", "a"]) == ["c", "d", "b", "a"]
    assert fixtures_below(item, ["d"]) == ["d"]
    assert fixtures_below(SimpleNamespace(), ["d"]) == ["d"]  # type: ignore[arg-type]


def test_only_an_order_for_a_stage_runs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda item, name: (item, name)  # noqa: E731
    monkeypatch.setattr("lockstep.features.stages.pytest_internals.make_stage", made)
    item: Any = "item"
    run: Callable[[Any], Any] = lambda of: plugins.pytest_ranks_item(  # noqa: E731
        item,
        SimpleNamespace(preparation=of),  # type: ignore[arg-type]
    )
    assert run(None) is None
    assert run(Preparation("other", "a")) is None
    assert run(Preparation("stage", "a")) == ("item", "a")


# The fixture


def value_of(function: Any, *parts: tuple[str, str], has_order: bool = True) -> Any:
    order = SimpleNamespace(parts={FEATURE: parts} if parts else {}) if has_order else None
    manager = SimpleNamespace(get_plugin=lambda name: SimpleNamespace(order=order))
    return function(request=SimpleNamespace(fixturename="a", config=SimpleNamespace(pluginmanager=manager)))


def test_the_value_of_the_fixture_is_a_directory(tmp_path: Any) -> None:
    found = _find_path(a_stage())
    for _ in range(2):
        assert value_of(found, ("b", "/b"), ("a", f"{tmp_path}/x/y")) == tmp_path / "x" / "y"
        assert (tmp_path / "x" / "y").is_dir()
    why = "the stage `a` has not run: a test requests it as an argument or by `usefixtures`, not by"
    for parts, has_order in (((("b", "/b"),), True), ((), True), ((), False)):
        with pytest.raises(pytest.fail.Exception, match=why) as failed:
            value_of(found, *parts, has_order=has_order)
        assert failed.value.pytrace is False


def test_a_stage_is_found_again_by_the_function_of_its_fixture() -> None:
    assert find_stage(_find_path(of := a_stage())) is of
    assert find_stage(body) is find_stage(None) is None
    other: Any = SimpleNamespace(stage="of a pipeline")
    assert find_stage(other) is None
    made = stage(1, "module")(body)
    assert getattr(find_path := _find_path(of), ONLY_ON_RANKS) is True
    assert find_path.__name__ == "body"
    assert find_stage(made._get_wrapped_function()) == Stage(body, 1, "module")
    assert made._fixture_function_marker.scope == "module"
