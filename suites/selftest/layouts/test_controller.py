"""Unit tests of layouts in the controller: which items run, which are skipped, and the line on each test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.layouts import controller
from lockstep.features.layouts.controller import Layouts
from lockstep.features.layouts.mark import Sizes

DP2, TP2 = Sizes((("dp", 2), ("tp", 1))), Sizes((("dp", 1), ("tp", 2)))
BOTH, WIDE = Sizes((("dp", 2), ("tp", 2))), Sizes((("dp", 4), ("tp", 2)))
AGAIN = Sizes((("dp", 2), ("tp", 2)), again=True)


class Item(SimpleNamespace):
    """An item, which equals itself alone."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def item(sizes: object, test: str = "test_a.py::test_a", others: str = "") -> Any:
    name = getattr(sizes, "name", "x")
    return Item(
        callspec=SimpleNamespace(params={"layout": sizes}),
        nodeid=f"{test}[{name}{others}]",
        path=Path("/base/test_a.py"),
        location=("test_a.py", 6, "test_a"),
        keywords={},
        user_properties=[],
        stash=pytest.Stash(),
    )


PLAIN: Any = Item(nodeid="test_a.py::test_plain")


class Run:
    """A session with layouts, and what it did with its items."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_worker: bool = False, **options: Any) -> None:
        self.deselected: list[Any] = []
        self.unregistered: list[Any] = []
        given = {"layouts": None, "all_layouts": False, **options}
        self.config: Any = SimpleNamespace(
            getoption=given.__getitem__,
            pluginmanager=SimpleNamespace(unregister=self.unregistered.append),
            hook=SimpleNamespace(pytest_deselected=lambda items: self.deselected.extend(items)),
        )
        if is_worker:
            self.config.workerinput = {}
        self.layouts = Layouts(self.config)
        monkeypatch.setattr(controller, "make_report", self._report)

    @staticmethod
    def _report(of: Any, when: str, outcome: str, longrepr: object = None) -> Any:
        return SimpleNamespace(when=when, outcome=outcome, longrepr=longrepr, user_properties=[])

    def selected(self, *items: Any) -> list[Any]:
        found = [*items]
        self.layouts.pytest_collection_modifyitems(found)
        return found

    def reported(self, of: Any, *outcomes: str) -> list[Any]:
        reports: list[Any] = [
            SimpleNamespace(failed=each == "failed", user_properties=[]) for each in outcomes
        ]
        self.layouts.pytest_ranks_reported(of, reports)
        return [each.user_properties for each in reports]

    def summary(self, **stats: list[Any]) -> list[str]:
        lines: list[str] = []
        reporter: Any = SimpleNamespace(stats=stats, write_line=lines.append)
        self.layouts.pytest_terminal_summary(reporter)
        return lines


def test_layouts_are_selected_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [PLAIN, item(DP2), item(TP2), item(BOTH), item(AGAIN), item("dp2")]
    run = Run(monkeypatch, layouts="tp*, dp2-tp2")
    assert run.selected(*items) == [PLAIN, items[2], items[3], items[5]]
    assert run.deselected == [items[1], items[4]]
    everything = Run(monkeypatch, layouts="*")
    assert everything.selected(*items) == items
    assert Run(monkeypatch).selected(*items) == items
    assert (everything.deselected, everything.unregistered) == ([], [])


def test_a_session_without_layouts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, layouts="dp2")
    assert run.selected(PLAIN, item("dp2")) != []
    assert run.unregistered == [run.layouts]
    assert run.deselected == []


def test_a_layout_that_contains_a_failed_one_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert run.layouts.pytest_ranks_before(item(BOTH)) is None
    assert run.reported(item(TP2), "passed", "failed") == [[("layout", "test_a.py::test_a tp2")]] * 2
    assert run.reported(item(DP2), "passed") == [[("layout", "test_a.py::test_a dp2")]]
    assert run.reported(PLAIN, "failed") == [[]]
    for sizes in (TP2, DP2):
        assert run.layouts.pytest_ranks_before(item(sizes)) is None
    assert run.layouts.pytest_ranks_before(PLAIN) is None
    assert run.layouts.pytest_ranks_before(item(WIDE, "test_a.py::test_b")) is None
    assert run.layouts.pytest_ranks_before(item(WIDE, others="-3")) is None
    skipped, torn_down = run.layouts.pytest_ranks_before(item(WIDE)) or ()
    assert (skipped.when, skipped.outcome) == ("setup", "skipped")
    assert skipped.longrepr == ("/base/test_a.py", 7, "Skipped: contains tp2, which failed")
    assert skipped.user_properties == [("layout", "test_a.py::test_a dp4-tp2")]
    assert (torn_down.when, torn_down.outcome, torn_down.user_properties) == ("teardown", "passed", [])
    all_run = Run(monkeypatch, all_layouts=True)
    all_run.reported(item(TP2), "failed")
    assert all_run.layouts.pytest_ranks_before(item(WIDE)) is None


@pytest.mark.parametrize(
    ("nodeid", "test"),
    [
        ("a.py::t[dp2-tp2]", "a.py::t"),
        ("a.py::t[2-ranks-dp2-tp2-x]", "a.py::t[2-ranks-x]"),
        ("a.py::t[x-dp2-tp2]", "a.py::t[x]"),
        ("a.py::t[dp2-tp2-dp2-tp2]", "a.py::t[dp2-tp2]"),
        ("a.py::t[x[0]-dp2-tp2]", "a.py::t[x[0]]"),
    ],
)
def test_a_test_is_named_without_its_layout(nodeid: str, test: str) -> None:
    of = item(BOTH)
    of.nodeid = nodeid
    assert controller._test_of(of) == test


def reports(test: str, *layouts: str) -> list[Any]:
    return [
        SimpleNamespace(user_properties=[("other", "x"), ("layout", f"{test} {each}")]) for each in layouts
    ]


def test_the_line_on_a_test_counts_its_layouts_and_names_the_smallest_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    stats = {
        "passed": [*reports("a.py::t", "dp2", "tp2", "tp2", "dp4"), object()],
        "error": reports("a.py::t", "dp4"),
        "failed": reports("a.py::t", "dp2-tp2", "dp4-tp2"),
        "skipped": reports("a.py::t", "dp8"),
        "rerun": reports("a.py::t", "dp9"),
    }
    assert run.summary(**stats) == [
        "layouts of a.py::t: 2 of 6 held, 3 failed, dp4 the smallest, 1 not run",
    ]
    # The reports of `pytest -n` may come in any order.
    assert run.summary(**dict(reversed(stats.items()))) == run.summary(**stats)
    assert Run(monkeypatch, is_worker=True).summary(**stats) == []


def test_a_single_layout_has_a_line_if_it_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"passed": [*reports("a.py::t", "dp2"), *reports("a.py::u", "dp2", "tp2")]}
    assert Run(monkeypatch).summary(**one) == ["layouts of a.py::u: 2 of 2 held"]
    assert Run(monkeypatch, layouts="dp2").summary(**one) == [
        "layouts of a.py::t: 1 of 1 held",
        "layouts of a.py::u: 2 of 2 held",
    ]


def test_layouts_that_hold_in_one_order_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Run(monkeypatch).summary(
        passed=reports("a.py::t", "dp2", "dp2-again", "tp2", "dp4-again"),
        failed=reports("a.py::t", "tp2-again", "dp4"),
    )
    assert found == [
        "layouts of a.py::t: 4 of 6 held, 2 failed, tp2-again the smallest; "
        "tp2, dp4 in one order alone: another layout leaves state in the process"
    ]
