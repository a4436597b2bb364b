"""Bounds of numbers, and how a wrong value is shown."""

from __future__ import annotations

import math

import pytest

from lockstep.bounds import MOST_SECONDS, are_seconds, is_number, is_whole, shown


class WithoutRepr:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_a_value_is_shown_up_to_a_hundred_characters() -> None:
    fits, too_long = "x" * 98, "x" * 99
    assert shown(fits) == repr(fits)
    assert shown(too_long) == f"'{'x' * 59}... (101 characters)"


@pytest.mark.parametrize("value", [10**4301, WithoutRepr()], ids=["int", "raises"])
def test_a_value_that_has_no_repr_is_shown_by_its_type(value: object) -> None:
    assert shown(value).startswith(f"<{type(value).__name__} without a repr: ")


def test_truth_values_are_no_numbers() -> None:
    assert [is_whole(each) for each in (3, True, 3.0)] == [True, False, False]
    assert [is_number(each) for each in (3, 3.5, True, "3")] == [True, True, False, False]


def test_seconds_can_be_waited_for() -> None:
    wrong = (0, -1, math.nan, math.inf, MOST_SECONDS + 1, "1", True)
    assert not any(are_seconds(each) for each in wrong)
    assert all(are_seconds(each) for each in (0.1, 1, MOST_SECONDS))
