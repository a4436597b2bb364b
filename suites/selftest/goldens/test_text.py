"""Unit tests of the text of a golden: how it is written and read, and what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.assertions.closeness import Tolerance
from lockstep.features.goldens.text import Golden, GoldenEntry, differences

TEXT = """\
# Golden of a.py::test. Written by: pytest --update-goldens
# Made by torch 2.13, gloo
loss 0      | all    | float32 [] value 0.5
gradients 0 | rank 0 | float32 [2, 2] norm 4 sum 1 mix 2 bits 12
gradients 0 | rank 1 | float32 [2, 2] norm 4 sum 1 mix 2 bits 34
collectives:
all_reduce | all    | float32[3] 2 ranks forward
barrier    | all    |
barrier    | all    |
"""
GOLDEN = Golden(
    "a.py::test",
    "torch 2.13, gloo",
    (
        GoldenEntry("loss 0", "all", "float32 [] value 0.5"),
        GoldenEntry("gradients 0", "rank 0", "float32 [2, 2] norm 4 sum 1 mix 2 bits 12"),
        GoldenEntry("gradients 0", "rank 1", "float32 [2, 2] norm 4 sum 1 mix 2 bits 34"),
    ),
    (
        GoldenEntry("all_reduce", "all", "float32[3] 2 ranks forward"),
        GoldenEntry("barrier", "all", ""),
        GoldenEntry("barrier", "all", ""),
    ),
)


def test_a_golden_is_written_in_columns_and_read_again() -> None:
    assert GOLDEN.render() == TEXT
    assert Golden.parse(TEXT) == GOLDEN
    assert Golden.parse(TEXT.replace("collectives:", "\ncollectives:\n")) == GOLDEN
    head = "".join(TEXT.splitlines(keepends=True)[:2])
    with pytest.raises(ValueError, match=r"^there is no line `collectives:`$"):
        Golden.parse(head)
    for cut in (head.splitlines()[0], head.replace("Golden", "golden"), head.replace("Made", "made")):
        with pytest.raises(ValueError, match=r"^line 1: a golden begins with two lines of comments"):
            Golden.parse(f"{cut}\ncollectives:\n")
    empty = Golden("a.py::test", "torch", (), ())
    assert Golden.parse(empty.render()) == empty


def of(*texts: str) -> Golden:
    """Return a golden of a value for each text."""
    return Golden(
        "test", "torch", tuple(GoldenEntry(f"v{n}", "all", text) for n, text in enumerate(texts)), ()
    )


def test_the_first_value_that_differs_is_shown_with_counts() -> None:
    golden, now = of("a", "b", "c"), of("a", "x", "y")
    assert differences(golden, now, None) == [
        "first difference: v1 (all ranks), after 1 values that agree",
        "  golden    b",
        "  this run  x",
        "  2 of 3 values differ",
    ]
    assert differences(golden, now, Tolerance(1, 1))[-1] == "  2 of 3 values differ beyond the tolerance"


def test_a_value_that_only_one_run_has_differs() -> None:
    assert differences(of("a", "b"), of("a"), None)[1:3] == ["  golden    b", "  this run  has no such value"]
    assert differences(of("a"), of("a", "b"), None)[1:3] == ["  golden    has no such value", "  this run  b"]


def test_another_maker_is_named_only_where_something_differs() -> None:
    other = replace(of("b"), made_by="torch 3")
    assert differences(of("a"), other, None)[-1] == "the golden was made by torch; this is torch 3"
    assert differences(of("b"), other, None) == []
    assert len(differences(of("a"), of("b"), None)) == 4


def norm(text: str, shape: str = "[4]", dtype: str = "float32") -> str:
    return f"{dtype} {shape} {text}"


# Of 4 elements: norm 10 may be off by 2 * atol + 10 * rtol, sum and mix by twice as much.
@pytest.mark.parametrize(
    ("golden", "now", "close"),
    [
        (norm("norm 10 sum 5 mix 1 bits 1"), norm("norm 13 sum 11 mix 7 bits 2"), True),
        (norm("norm -10 sum 5 mix 1"), norm("norm -7 sum -1 mix -5"), True),
        (norm("norm 10 sum 5 mix 1"), norm("norm 13.1 sum 5 mix 1"), False),
        (norm("norm 10 sum 5 mix 1"), norm("norm 10 sum 11.1 mix 1"), False),
        (norm("norm 10 sum 5 mix 1"), norm("norm 10 sum 5 mix 7.1"), False),
        (norm("norm 10 sum 5 mix 1", "[2, 2]"), norm("norm 13 sum 11 mix 7", "[2, 2]"), True),
        (norm("norm 10 sum 5 mix 1", "[2, 2]"), norm("norm 10 sum 5 mix 1 bits", "[2, 3]"), False),
        (norm("norm 10 sum 5 mix 1"), norm("norm 10 sum 5 mix 1 bits", dtype="float64"), False),
        (norm("norm 10 sum 5 mix 1"), norm("norm 10 sum 5"), False),
        (norm("value 10", "[]"), norm("value 12", "[]"), True),
        (norm("value 10", "[]"), norm("value 12.1", "[]"), False),
        (norm("value inf", "[]"), norm("value inf bits", "[]"), True),
        (norm("value nan", "[]"), norm("value nan bits", "[]"), True),
        (norm("value nan", "[]"), norm("value 1", "[]"), False),
        (norm("value 1", "[]"), norm("value nan", "[]"), False),
        (norm("value True", "[]", "bool"), norm("value True bits", "[]", "bool"), True),
        (norm("value False", "[]", "bool"), norm("value 0", "[]", "bool"), True),
        (norm("bits 1"), norm("bits 2"), False),
        (norm("bits 1"), norm("bits 1"), True),
    ],
)
def test_numbers_are_close_by_the_tolerance_of_each_element(golden: str, now: str, close: bool) -> None:
    assert (differences(of(golden), of(now), Tolerance(1.0, 0.1)) == []) is close
    assert (differences(of(golden), of(now), None) == []) is (golden == now)


def test_collectives_that_differ_are_a_diff_with_two_lines_around() -> None:
    names = [GoldenEntry(name, "all", "text") for name in "abcdefg"]
    golden = Golden("test", "torch", (), tuple(names))
    assert differences(golden, replace(golden, collectives=tuple(names[:3] + names[4:])), None) == [
        "the sequence of collectives differs (- golden, + this run):",
        "  @@ -2,5 +2,4 @@",
        "   b text (all)",
        "   c text (all)",
        "  -d text (all)",
        "   e text (all)",
        "   f text (all)",
    ]


@pytest.mark.parametrize(("number", "last"), [(13, "  +n12 text (all)"), (14, "  and 1 more lines")])
def test_a_long_diff_is_cut(number: int, last: str) -> None:
    now = tuple(GoldenEntry(f"n{each}", "all", "text") for each in range(number))
    lines = differences(of(), replace(of(), collectives=now), None)
    assert (len(lines), lines[-1]) == (min(number, 14) + 2, last)
