"""Schedules of tests: those of marks and options, an item for each seed, and what ranks take of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.injection import plugin, skewed_items
from lockstep.features.injection.schedule import Schedule
from lockstep.features.injection.skewed_items import SkewedItems, schedules_of
from lockstep.hookspecs import RANK_PLUGIN

# Items


def test_schedules_of_a_mark() -> None:
    def of(*args: object, **kwargs: object) -> dict[int, Schedule]:
        return schedules_of(pytest.mark.skew(*args, **kwargs).mark)

    assert of() == {seed: Schedule(seed, 3.0) for seed in (1, 2, 3, 4, 5)}
    assert of(seeds=2, milliseconds=7) == {seed: Schedule(seed, 7) for seed in (1, 2)}
    assert of(seeds=(9, 0)) == {9: Schedule(9), 0: Schedule(0)}
    assert of(milliseconds=60000)[1].milliseconds == 60000
    assert len(of(seeds=10_000)) == 10_000
    for args, kwargs, message in (
        ((3,), {}, "skew(3): write skew(seeds=5) or skew(seeds=[3], milliseconds=20)"),
        ((), {"seed": 1}, "skew(seed=...): write skew(seeds=5) or skew(seeds=[3], milliseconds=20)"),
        *(
            (
                (),
                {"seeds": seeds},
                f"skew(seeds={seeds!r}): a number from 1 to 10000, or a list of at most as",
            )
            for seeds in (0, 10_001, [], "12", [1, -1], None, 1.5)
        ),
        *(
            ((), {"milliseconds": each}, f"skew(milliseconds={each!r}): above 0 and at most 60000")
            for each in (0, 60_001, "1", None, float("nan"))
        ),
    ):
        with pytest.raises(pytest.fail.Exception) as failed:
            of(*args, **kwargs)
        assert str(failed.value).startswith(message)
        assert failed.value.pytrace is False


class Items:
    """A plugin of rank 2, and under which schedules something ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, option: str | None = None) -> None:
        self.ran: list[object] = []
        self.on = ""
        self.runners: list[Any] = []
        rank: Any = SimpleNamespace(spec=SimpleNamespace(rank=2))
        self.plugin = SkewedItems(rank, option)
        monkeypatch.setattr(skewed_items, "Skew", self._skew)
        monkeypatch.setattr(skewed_items, "RunSubtests", self._runner(monkeypatch))
        monkeypatch.setattr(skewed_items, "fixture_value", lambda item, name: f"{name} of {item.name}")

    def _skew(self, schedule: Schedule, rank: int) -> Any:
        @contextlib.contextmanager
        def on() -> Iterator[None]:
            self.on = f"{schedule} of rank {rank}"
            yield
            self.on = ""

        return SimpleNamespace(on=on)

    def _runner(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        items = self

        class Runner:
            outer = ""

            def __init__(self, rank: Any, subtests: str, chosen: dict[str, str]) -> None:
                self.made = rank.spec.rank, subtests, chosen
                self.settings: Any = None
                self.selected: Any = None
                items.runners.append(self)

            def __call__(self, settings: dict[str, list[int]], run: Any) -> None:
                self.settings = settings
                for seed in settings["skew"]:
                    run(skew=seed)

            def select(self, selected: dict[str, str]) -> None:
                self.selected = selected

            def skip_if_nothing_ran(self) -> None:
                items.ran.append("looks whether any ran")

        return Runner

    def call(self, mark: pytest.Mark | None, subtest: list[str], **fixtures: Any) -> Any:
        """Run a function with a mark; return it as it is behind the call."""

        def test(**arguments: object) -> None:
            own = fixtures.get("run_subtests")
            self.ran.append((self.on, arguments, getattr(own, "outer", None)))

        config = SimpleNamespace(getoption={"subtest": subtest}.get)
        item: Any = SimpleNamespace(
            name="test_a",
            obj=test,
            config=config,
            funcargs=fixtures,
            get_closest_marker=lambda name: mark if name == "skew" else None,
        )
        hook = self.plugin.pytest_pyfunc_call(item)
        next(hook)
        item.obj(a=1)
        with pytest.raises(StopIteration) as stopped:
            hook.send("ran")
        assert stopped.value.value == "ran"
        assert item.obj is test
        return item


def test_a_marked_function_runs_once_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    items = Items(monkeypatch)
    items.call(pytest.mark.skew(seeds=[4, 6]).mark, [])
    assert items.ran == [
        ("4 of rank 2", {"a": 1}, None),
        ("6 of rank 2", {"a": 1}, None),
        "looks whether any ran",
    ]
    (runner,) = items.runners
    assert runner.made == (2, "subtests of test_a", {})
    assert runner.settings == {"skew": [4, 6]}
    own = skewed_items.RunSubtests(SimpleNamespace(spec=SimpleNamespace(rank=0)), "x", {})  # type: ignore[arg-type]
    items.ran.clear()
    items.call(pytest.mark.skew(seeds=[4]).mark, ["skew=4,value=3"], run_subtests=own)
    assert items.ran == [("4 of rank 2", {"a": 1}, "skew=4"), "looks whether any ran"]
    assert own.selected == {"value": "3"}  # type: ignore[attr-defined]
    assert items.runners[-1].made == (2, "subtests of test_a", {"skew": "4"})
    items.call(pytest.mark.skew(seeds=[4]).mark, [], run_subtests="of another plugin")


def test_other_functions_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = pytest.mark.skew(seeds=[4]).mark
    for option, mark in ((None, None), (None, pytest.mark.skew(seeds=[]).mark), ("7", marked)):
        items = Items(monkeypatch, option)
        items.call(mark, [])
        assert items.ran == [("", {"a": 1}, None)]


@pytest.mark.parametrize(
    ("option", "mark", "on"),
    [
        (None, None, ""),
        ("7:2", None, "7:2 of rank 2"),
        ("7:2", pytest.mark.skew(seeds=()).mark, ""),
        ("7:2", pytest.mark.skew().mark, "7:2 of rank 2"),
        ("7:2", pytest.mark.skew(seeds=0).mark, "7:2 of rank 2"),
    ],
)
def test_an_option_disturbs_all_items_but_those_that_are_exempt(
    monkeypatch: pytest.MonkeyPatch, option: str | None, mark: pytest.Mark | None, on: str
) -> None:
    items = Items(monkeypatch, option)
    item: Any = SimpleNamespace(get_closest_marker=lambda name: mark if name == "skew" else None)
    hook = items.plugin.pytest_ranks_run_item(item)
    next(hook)
    assert items.on == on
    with pytest.raises(StopIteration) as stopped:
        hook.send("ran")
    assert (stopped.value.value, items.on) == ("ran", "")


# The plugin


class Config:
    def __init__(self, option: str | None, backend: str | None = None) -> None:
        self.option = SimpleNamespace(ranks_skew=option)
        self.plugins: dict[str, Any] = {}
        if backend:
            rank = SimpleNamespace(spec=SimpleNamespace(rank=1))
            self.plugins[RANK_PLUGIN] = SimpleNamespace(world=SimpleNamespace(backend=backend), rank=rank)
        self.pluginmanager = SimpleNamespace(
            hasplugin=self.plugins.__contains__,
            get_plugin=self.plugins.get,
            register=lambda made, name: self.plugins.__setitem__(name, made),
        )
        self.lines: list[tuple[str, str]] = []

    def addinivalue_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))


@pytest.mark.parametrize(
    ("option", "backend", "is_skewed"),
    [(None, "gloo", False), ("7", "gloo", True), ("7", "fake", False), ("7", None, False)],
)
def test_a_rank_delays_by_the_option(option: str | None, backend: str | None, is_skewed: bool) -> None:
    config: Any = Config(option, backend)
    plugin.pytest_configure(config)
    assert ("harness-skew" in config.plugins) is is_skewed
    assert config.lines == [
        ("markers", "skew(seeds=5, milliseconds=3): run a test under schedules of delays.")
    ]
    made = config.plugins.get("harness-skew")
    plugin.pytest_configure(config)
    assert config.plugins.get("harness-skew") is made
    with pytest.raises(pytest.UsageError, match=r"^--skew 'x': write SEED or SEED:MILLISECONDS"):
        plugin.pytest_configure(Config("x", backend))  # type: ignore[arg-type]


def item_of(config: Any, *marks: str, cls: type | None = None) -> Any:
    return SimpleNamespace(
        config=config,
        cls=cls,
        stash=pytest.Stash(),
        get_closest_marker=lambda name: name if name in marks else None,
    )


def test_marks_that_would_do_nothing_are_refused() -> None:
    import unittest

    from lockstep.controller.requests import REFUSAL
    from lockstep.reporting.merge import HAS_CASES

    def why(option: str | None, *marks: str, cls: type | None = None) -> str:
        config: Any = Config(option)
        item = item_of(config, *marks, cls=cls)
        plugin.pytest_collection_modifyitems(config, [item_of(config), item])
        assert item.stash.get(HAS_CASES, False) is ("skew" in marks)
        refusal = item.stash.get(REFUSAL, None)
        assert refusal is None or refusal.outcome == "failed"
        return "" if refusal is None else refusal.why

    method = unittest.TestCase
    assert why(None, "ranks") == why(None, "ranks", "skew") == why(None, "ranks", "skew", cls=int) == ""
    assert why(None, "skew") == "skew: the test has no ranks to delay; write @pytest.mark.ranks(2), too"
    assert why(None, "skew", "ranks", cls=method).startswith("skew: the mark is for functions and plain")
    assert why("7", "skew", "ranks", cls=method) == ""


def test_a_rank_runs_items_by_their_marks_once_there_is_one() -> None:
    config: Any = Config(None, "gloo")
    plugin.pytest_collection_modifyitems(config, [item_of(config)])
    assert "harness-skew" not in config.plugins
    marked = item_of(config, "skew")
    plugin.pytest_collection_modifyitems(config, [item_of(config), marked])
    assert config.plugins["harness-skew"]._schedule is None
    assert len(marked.stash) == 0
