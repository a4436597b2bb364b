"""Unit tests of adoption: the options, what is chosen and why not, and what is reported of it."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.adopt import plugin
from lockstep.features.adopt.controller import Adoption
from lockstep.features.adopt.kinds import (
    Demand,
    LeftAlone,
    NothingToRun,
    NotOnRanks,
    is_skipped,
    kind_of,
)
from lockstep.features.adopt.multi_process import MultiThreaded

# Options


def config(
    option: str | None = None, ini: tuple[str, ...] = (), groups: str = "own", on_cpu: bool = False
) -> Any:
    options = {"ranks_adopt": option, "ranks_adopt_cpu": on_cpu}
    values = {"ranks_adopt": list(ini), "ranks_adopt_groups": groups}
    return SimpleNamespace(getoption=options.__getitem__, getini=values.__getitem__)


def test_the_option_goes_before_the_ini_file() -> None:
    assert plugin.families_of(config(ini=("torch",))) == ("torch",)
    assert plugin.families_of(config("deepspeed,spawn torch", ("torch",))) == ("deepspeed", "spawn", "torch")
    assert plugin.families_of(config("", ("torch",))) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("torch,thorch"), "ranks_adopt: unknown kind 'thorch'; there are torch, deepspeed, spawn"),
        (config(groups="all"), "ranks_adopt_groups = 'all': choose own, reuse"),
        (
            config("deepspeed", on_cpu=True),
            "--ranks-adopt-cpu: add --ranks-adopt torch, whose tests it is for",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        plugin.pytest_configure(given)
    assert str(refused.value) == message


def test_kinds_are_those_of_the_families_asked_for() -> None:
    plugin.pytest_configure(config("spawn"))
    names = {
        families: [type(kind).__name__ for kind in plugin._kinds_of(families)]
        for families in (("torch",), ("spawn", "deepspeed"), ("spawn",))
    }
    assert names == {
        ("torch",): ["MultiProcess", "Continuous", "MultiThreaded"],
        ("spawn", "deepspeed"): ["DistributedTest"],
        ("spawn",): [],
    }


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        (b"import distributed\nclass A(B):\n", True),
        (b"Distributed\nclass A(B):\n", True),
        (b"import distributed\nclass A:\n", False),
        (b"import distributed\n class A(B):\n", False),
        (b"class A(B):\n", False),
    ],
)
def test_files_with_subclasses_and_distributed_may_have_classes(text: bytes, mentioned: bool) -> None:
    for families in ("torch", "deepspeed"):
        assert plugin.pytest_ranks_mentioned(config(families), text) is mentioned
    assert not plugin.pytest_ranks_mentioned(config("spawn"), text)


def test_the_server_imports_what_tests_of_torch_do() -> None:
    hints: list[str] = []
    plugin.pytest_ranks_imports(config("deepspeed"), hints)
    assert hints == []
    plugin.pytest_ranks_imports(config("torch"), hints)
    assert hints == list(plugin.IMPORTS)
    assert plugin.pytest_ranks_repeated_options() == {"ranks_adopt": None, "ranks_adopt_cpu": False}


# Choice


class Item:
    """An item of a class."""

    def __init__(self, cls: type | None, marked: bool = False, name: str = "test_a") -> None:
        self.cls, self.nodeid, self.name = cls, f"a.py::{getattr(cls, '__name__', '')}::{name}", name
        self.stash: Any = pytest.Stash()
        self.marks: list[pytest.Mark] = []
        self._marked = marked

    def get_closest_marker(self, name: str) -> object:
        return "a mark" if self._marked and name == "ranks" else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.append(marker.mark)


class Wanted:
    """A kind of the classes that say what they demand."""

    family = "torch"

    def matches(self, cls: type) -> bool:
        return hasattr(cls, "wants")

    def demand(self, item: Any) -> Demand:
        if isinstance(item.cls.wants, Demand):
            return item.cls.wants
        raise item.cls.wants


def adopted(*items: Item, report: bool = True, **attributes: Any) -> tuple[Adoption, list[str]]:
    """Return an adoption after a collection, and the lines of its summary."""
    options = {"world_timeout": 60.0, "ranks_adopt_report": report}
    given = SimpleNamespace(getoption=options.__getitem__, **attributes)
    adoption = Adoption(given, (Wanted(),))  # type: ignore[arg-type]
    for item in items:
        adoption.pytest_itemcollected(item)  # type: ignore[arg-type]
    adoption.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    return adoption, summary(adoption)


def summary(adoption: Adoption) -> list[str]:
    lines: list[str] = []
    reporter = SimpleNamespace(section=lambda title, sep: lines.append(title), write_line=lines.append)
    adoption.pytest_terminal_summary(reporter)  # type: ignore[arg-type]
    return lines


def class_of(wants: object, name: str = "A") -> type:
    return type(name, (), {"wants": wants})


def test_an_item_gets_the_world_and_the_longer_time() -> None:
    short, long = Item(class_of(Demand(3, 5.0))), Item(class_of(Demand(2, 90.0)))
    adopted(short, long)
    assert [(mark.name, mark.args, mark.kwargs) for mark in (*short.marks, *long.marks)] == [
        ("ranks", (3,), {"timeout": 60.0}),
        ("ranks", (2,), {"timeout": 90.0}),
    ]


def test_items_that_are_not_adopted_stay_as_they_are() -> None:
    items = Item(class_of(Demand(3)), marked=True), Item(None), Item(int), Item(class_of(NotOnRanks()))
    _, lines = adopted(*items)
    assert [item.marks for item in items] == [[]] * 4
    assert lines == []
    empty = Item(class_of(NothingToRun("no rank")))
    adopted(empty)
    assert [(mark.name, mark.kwargs) for mark in empty.marks] == [("skip", {"reason": "no rank"})]


def test_the_report_lists_classes_with_the_reason() -> None:
    items = [Item(class_of(Demand(2), "B")), Item(class_of(LeftAlone("own launcher"), "A"))]
    items += [Item(class_of(Demand(2), "B"), name="test_b")]
    _, lines = adopted(*items)
    assert lines[0] == "adopted test classes"
    assert ["left to its own launcher: own launcher" in line for line in lines[1:3]] == [True, False]
    assert "on ranks" in lines[2]
    assert "2" in lines[2]
    _, brief = adopted(*items, report=False)
    assert len(brief) == 1
    assert adopted(*items[::2], report=False)[1] == []
    assert adopted(*items[::2])[1][0] == "adopted test classes"


def test_a_worker_of_xdist_leaves_its_counts_for_the_main_process() -> None:
    worker, lines = adopted(Item(class_of(LeftAlone("own"))), workerinput={}, workeroutput=(output := {}))
    worker.pytest_sessionfinish()
    main, none = adopted()
    assert none == []
    main.pytest_testnodedown(SimpleNamespace())
    for _ in range(2):
        main.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    assert summary(main) == lines != []
    adopted()[0].pytest_sessionfinish()


def test_the_first_kind_that_matches_counts() -> None:
    first, second = Wanted(), Wanted()
    assert kind_of(Item(class_of(None)), (first, second)) is first  # type: ignore[arg-type]
    assert kind_of(Item(int), (first, second)) is None  # type: ignore[arg-type]
    assert kind_of(SimpleNamespace(), (first,)) is None  # type: ignore[arg-type]


def test_tests_in_threads_are_left_alone() -> None:
    kind, nothing = MultiThreaded(), Item(int)
    place: Any = None
    with pytest.raises(LeftAlone, match=r"^its ranks are threads of one process$"):
        kind.demand(nothing)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        kind.owner_of_groups(nothing)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        kind.running(nothing, place)  # type: ignore[arg-type]
    assert [is_skipped(each) for each in (unittest.skip("why")(lambda: None), int)] == [True, False]
