"""Options of the mark `ranks` for fake worlds, and the errors of those that cannot be satisfied."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.marker import MarkError
from suites.selftest.test_marker import mark_of


def test_a_mark_is_read_with_its_ranks_as_a_tuple(pytestconfig: pytest.Config) -> None:
    mark = mark_of(pytestconfig, 8, backend="fake", as_rank=7, made_up_values=True)
    assert mark is not None
    assert mark.options == {"as_rank": (7,), "made_up_values": True}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((2,), {"as_rank": 1}, "ranks(as_rank=1): only in a fake world: add backend='fake'"),
        (
            (8, 4),
            {"as_rank": [0, 4], "backend": "fake"},
            "ranks(as_rank=[0, 4]): a world of 4 has the ranks 0 to 3",
        ),
        (
            (4,),
            {"as_rank": "0", "backend": "fake"},
            "ranks(as_rank='0'): write a rank, or a list of ranks: as_rank=[0, 511]",
        ),
        (
            (4,),
            {"as_rank": [1, 1], "backend": "fake"},
            "ranks(as_rank=[1, 1]): name at least one rank, and none twice",
        ),
        (
            (4,),
            {"as_rank": [], "backend": "fake"},
            "ranks(as_rank=[]): name at least one rank, and none twice",
        ),
        (
            (4,),
            {"made_up_values": "no"},
            "ranks(made_up_values='no'): made_up_values is True or False",
        ),
        (
            (2,),
            {"made_up_values": True},
            "ranks(made_up_values=True): only in a fake world: add backend='fake'",
        ),
        ((2,), {"made_up_values": None}, "ranks(made_up_values=None): made_up_values is True or False"),
    ],
)
def test_an_invalid_option_says_what_to_write(
    pytestconfig: pytest.Config, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(MarkError) as caught:
        mark_of(pytestconfig, *args, **kwargs)
    assert str(caught.value) == message
