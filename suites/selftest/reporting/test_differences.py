"""Unit tests of texts of several ranks that say the same, and of warnings of all ranks as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import Warned
from lockstep.reporting.differences import pass_on_warnings, without_addresses, without_own_number
from lockstep.world.outcome import ItemOutcome, RankOutcome


@pytest.mark.parametrize(
    ("text", "rank", "bare"),
    [
        ("rank 1: 1 is not 11 and #1, [1, 1.5", 1, "rank <its rank>: <its rank> is not 11 and #1, [1, 1.5"),
        (
            "rank1, rank_1, rank-1 and cuda:1",
            1,
            "rank<its rank>, rank_<its rank>, rank-<its rank> and cuda:<its rank>",
        ),
        ("rank 0 and rank 1", 1, "rank 0 and rank 1"),
        ("x.1 +1 a1 -1", 1, "x.1 +1 a1 -1"),
    ],
)
def test_a_text_is_compared_without_the_ranks_own_number(text: str, rank: int, bare: str) -> None:
    assert without_own_number(text, rank) == bare


def test_addresses_and_numbers_of_what_is_left_are_no_difference() -> None:
    assert without_addresses("f at 0x7fA0 of 3") == "f at 0x of 3"
    assert without_addresses("the test left behind 3 of 0x7f") == "the test left behind N of NxNf"


def warned(text: str, category: str = "UserWarning", module: str = "builtins", lineno: int = 3) -> Warned:
    return Warned(module, category, text, "a.py", lineno)


def test_a_warning_is_passed_on_once_with_its_class() -> None:
    recorded: list[dict[str, Any]] = []
    hook = SimpleNamespace(
        pytest_warning_recorded=SimpleNamespace(call_historic=lambda kwargs: recorded.append(kwargs))
    )
    item: Any = SimpleNamespace(nodeid="a.py::test", config=SimpleNamespace(hook=hook))

    def passed_on(*of_ranks: list[Warned], world: str = "") -> list[tuple[str, type]]:
        outcomes = tuple(
            RankOutcome(number, warnings=each, world=world) for number, each in enumerate(of_ranks)
        )
        recorded.clear()
        pass_on_warnings(item, ItemOutcome(outcomes, 1.0, False, 1.0))
        messages = [each["warning_message"] for each in recorded]
        assert all(each["nodeid"] == "a.py::test" for each in recorded)
        return [(str(each.message), each.category) for each in messages]

    both = passed_on([warned("a"), warned("b")], [warned("a")])
    assert both == [("a", UserWarning), ("b", UserWarning)]
    assert passed_on([warned("a", "Local", "nowhere")]) == [("Local: a", UserWarning)]
    assert passed_on([warned("a", "int")]) == [("int: a", UserWarning)]
    left = [[warned(text, "RankLeakWarning")] for text in ("left 0x1", "left 0x2", "other")]
    ((text, _),) = passed_on(*left)
    assert text.splitlines() == [
        "RankLeakWarning: ranks 0, 1: left 0x1 (rank 0; the others differ from it in numbers alone)",
        "rank 2: other",
    ]
    assert passed_on(left[2], left[2]) == [("RankLeakWarning: other", UserWarning)]
    assert passed_on(left[2], left[2], world="8") == [("RankLeakWarning: ranks 0, 1: other", UserWarning)]
    apart = passed_on([warned("a", "RankStateWarning"), warned("b", "RankStateWarning", lineno=4)])
    assert len(apart) == 2
