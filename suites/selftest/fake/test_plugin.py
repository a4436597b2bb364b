"""Unit tests of the plugin of fake worlds: items, the rank that an item stands for, and who fills values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.fake import FakeRank, plugin
from lockstep.features.fake.plugin import (
    _place_of,
    _places,
    pytest_ranks_items,
    pytest_ranks_outcome,
    pytest_ranks_size,
)
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.marker import MarkError


def mark_of(*sizes: int, backend: str | None = "fake", group: bool = True, **options: Any) -> Any:
    return SimpleNamespace(sizes=sizes, options=options, group=group, backend=backend)


def test_a_test_is_an_item_of_its_first_and_last_rank_unless_it_names_others() -> None:
    assert _places(mark_of(8, 1)) == [(0, 8), (7, 8), (0, 1)]
    assert _places(mark_of(8, 4, as_rank=(2, 1))) == [(2, 8), (1, 8), (2, 4), (1, 4)]


def test_an_item_stands_for_the_rank_of_its_parameter() -> None:
    def item(**params: Any) -> Any:
        return SimpleNamespace(callspec=SimpleNamespace(params=params))

    assert _place_of(SimpleNamespace(), mark_of(8, as_rank=(3,))) == (3, 8)  # type: ignore[arg-type]
    assert _place_of(item(ranks_place=(7, 8)), mark_of(8)) == (7, 8)
    for sizes, shown in (((8, 4), "8, 4"), ((8,), "8")):
        with pytest.raises(MarkError, match=rf"^ranks\({shown}\) of a fake world: several ranks work only"):
            _place_of(item(x=1), mark_of(*sizes))
    with pytest.raises(MarkError, match=r"^ranks\(4\) of a fake world, on one parameter of a test: its"):
        _place_of(item(ranks_place=(3, 4)), mark_of(8))


def test_an_order_names_the_rank_and_the_outcome_is_that_ranks() -> None:
    item: Any = SimpleNamespace()
    parts: dict[str, Any] = {}
    assert pytest_ranks_size(item, mark_of(8, as_rank=(3,)), "gloo", parts) is None
    assert parts == {}
    mark = mark_of(8, as_rank=(3,), made_up_values=True)
    assert pytest_ranks_size(item, mark, "fake", parts) == 1
    assert parts == {"fake": FakeRank(3, 8, True)}
    refusal: Any = pytest_ranks_size(item, mark_of(8, group=False), "fake", parts)
    assert (refusal.outcome, refusal.why) == (
        "skipped",
        "the test makes its own group (group=False), and a fake world has one",
    )
    outcome: Any = SimpleNamespace(ranks=[SimpleNamespace(rank=0, world="1")])
    run: Any = SimpleNamespace(order=SimpleNamespace(parts={}))
    pytest_ranks_outcome(run, outcome)
    assert (outcome.ranks[0].rank, outcome.ranks[0].world) == (0, "1")
    run.order.parts = parts
    pytest_ranks_outcome(run, outcome)
    assert (outcome.ranks[0].rank, outcome.ranks[0].world) == (3, "8 (fake)")


def test_a_test_of_several_ranks_is_parametrized_by_them() -> None:
    def made(mark: Any, of_run: str = "gloo") -> tuple[bool | None, list[str], list[Any]]:
        asked: list[Any] = []
        metafunc: Any = SimpleNamespace(
            config=SimpleNamespace(getoption={"ranks_backend": of_run, "ranks_device": None}.get),
            fixturenames=["world"],
            parametrize=lambda *args, **kwargs: asked.append((args, kwargs)),
        )
        return pytest_ranks_items(metafunc, mark), metafunc.fixturenames, asked

    both = (("ranks_place", [(0, 8), (7, 8)]), {"ids": ["rank-0-of-8", "rank-7-of-8"]})
    assert (
        made(mark_of(8)) == made(mark_of(8, backend=None), "fake") == (True, ["world", "ranks_place"], [both])
    )
    assert made(mark_of(8, as_rank=(3,))) == (True, ["world"], [])
    assert made(mark_of(8, backend="gloo"), "fake") == made(mark_of(8, backend=None)) == (None, ["world"], [])


def test_values_are_filled_on_ranks_of_fake_worlds_alone() -> None:
    def registered(backend: str | None) -> list[str]:
        lines: list[str] = []
        found: list[Any] = []
        rank: Any = SimpleNamespace()
        session = backend and SimpleNamespace(rank=rank, world=SimpleNamespace(backend=backend))
        manager = SimpleNamespace(get_plugin={RANK_PLUGIN: session}.get, register=found.append)
        config: Any = SimpleNamespace(
            pluginmanager=manager, addinivalue_line=lambda name, line: lines.append(f"{name}: {line}")
        )
        plugin.pytest_configure(config)
        (line,) = lines
        assert line.startswith("markers: ranks(*sizes, backend='fake', as_rank=None, made_up_values=False): ")
        assert all(each._rank is rank for each in found)
        return [type(each).__name__ for each in found]

    assert registered("fake") == ["FakeWorlds"]
    assert registered("gloo") == registered(None) == []
