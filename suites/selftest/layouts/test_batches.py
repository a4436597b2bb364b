"""Batches of witnesses, their parts, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.layouts import witness_batches
from lockstep.layouts.batches import keep_labels, part_of, refuse, rows_of


def valid(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return how many tokens of each row are predicted."""
    return (batch["labels"] != -100).sum(1).tolist()  # type: ignore[no-any-return]


def test_witnesses_have_unequal_numbers_of_valid_tokens() -> None:
    batches = witness_batches(11)
    assert [valid(batch) for batch in batches] == [
        [2, 7, 12, 0, 7, 12, 2, 7, 12, 2, 0, 12, 2, 7, 12, 2, 7, 0, 2, 7, 12, 2, 7, 12],
        [5, 10, 15, 0, 10, 15, 5, 10, 15, 0, 0, 0, 5, 10, 15, 5, 10, 0, 5, 10, 15, 5, 10, 15],
        [0, 0, 0, 16, 13, 3, *[0] * 18],
    ]
    for batch in batches:
        assert list(batch) == ["tokens", "labels"]
        assert {each.dtype for each in batch.values()} == {torch.int64}
        assert {each.shape for each in batch.values()} == {(24, 16)}
        assert batch["tokens"].is_contiguous()
        known = batch["labels"][:, :-1] != -100
        assert batch["labels"][:, :-1][known].equal(batch["tokens"][:, 1:][known])
        assert set(batch["tokens"].unique().tolist()) == set(range(11))


def test_witnesses_are_those_of_a_seed_and_a_size() -> None:
    first, again = witness_batches(11), witness_batches(11, seed=0)
    assert all(one[name].equal(other[name]) for one, other in zip(first, again, strict=True) for name in one)
    assert not first[0]["tokens"].equal(witness_batches(11, seed=1)[0]["tokens"])
    (one,) = witness_batches(5, sequences=8, tokens=4, steps=1)
    assert one["tokens"].shape == (8, 4)
    assert valid(one) == [2, 4, 3, 0, 4, 3, 2, 4]
    (_, last) = witness_batches(11, sequences=64, steps=2)
    assert [row for row, found in enumerate(valid(last)) if found] == [8, 9, 11, 12, 13, 14, 15]
    assert valid(last)[8] == 16
    long = witness_batches(11, steps=7)
    assert [
        [row for row in range(0, 24, 3) if not any(valid(batch)[row : row + 3])] for batch in long[:-1]
    ] == [
        [],
        [9],
        [12],
        [15],
        [18],
        [6],
    ]


def test_one_sequence_part_is_predicted() -> None:
    batch = {
        "tokens": torch.arange(8).view(2, 4),
        "labels": torch.arange(8).view(2, 4),
        "more": torch.ones(1),
    }
    kept = keep_labels(batch, 1, 2)
    assert kept["labels"].tolist() == [[-100, -100, 2, 3], [-100, -100, 6, 7]]
    assert kept["tokens"] is batch["tokens"]
    assert kept["more"] is batch["more"]
    assert batch["labels"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_are_cut_and_what_has_none_is_whole() -> None:
    batch: dict[str, Any] = {
        "scale": torch.tensor(2.0),
        "x": torch.arange(5),
        "y": torch.arange(10).view(5, 2),
        "table": torch.arange(3),
        "word": "a",
    }
    assert rows_of(batch) == 5
    found = part_of(batch, 1, 2)
    assert found["x"].tolist() == [3, 4]
    assert found["y"].tolist() == [[6, 7], [8, 9]]
    assert found["table"].tolist() == [0, 1, 2]
    assert (found["scale"].item(), found["word"]) == (2.0, "a")
    assert part_of(torch.arange(5), 0, 2).tolist() == [0, 1, 2]
    assert rows_of(torch.ones(4, 2)) == 4
    assert rows_of({"scale": torch.tensor(1.0)}) == rows_of("a") == 0


X, Y, Z = (torch.arange(6.0).view(6, 1) + 10 * step for step in range(3))
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "none": (
        ([], (), 2),
        "one batch: a gradient left in from the step before would go unseen; give two or more",
    ),
    "numbers": (([X, Y], (1, 1, 1), 2), "microbatches=(1, 1, 1) for 2 batches: give one number for each"),
    "word": (([X, "y"], (1, 1), 2), "batch 1 is str: give a tensor, or a mapping of tensors"),
    "tuple": (([(X,), Y], (1, 1), 2), "batch 0 is tuple: give a tensor, or a mapping of tensors"),
    "no rows": (
        ([X, {"y": torch.tensor(1.0)}], (1, 1), 2),
        "batch 1 is dict: give a tensor, or a mapping of ",
    ),
    "too few": (([X, Y], (3, 4), 2), "batch 1 has 6 rows: too few for 2 parts of 4 microbatches"),
    "parts": (
        ([X, torch.tensor([[1.0], [2.0], [1.0]])], (1, 1), 3),
        "parts 0 and 2 of 3 of batch 1 are alike: a rank that reads the other's would go unseen; give each "
        "sequence its own data",
    ),
    "microbatches": (
        ([X, torch.tensor([1.0, 2, 3, 1])], (1, 2), 2),
        "parts 0 and 3 of 4 of batch 1 are alike:",
    ),
    "batches": (([X, Y, X], (1, 1, 1), 2), "batches 0 and 2 are alike: give each step its own data"),
    "scalars": (
        ([{"x": X, "s": torch.tensor(1)}, {"x": X, "s": torch.tensor(2)}], (1, 1), 2),
        "batches 0 and 1 are alike:",
    ),
    "names": (([{"x": X, "y": Y}, {"x": X}], (1, 1), 2), "batches 0 and 1 are alike:"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_batches_of_which_wrong_reductions_look_right_are_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        refuse(*given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("batches", "microbatches", "parts"),
    [
        ([X, Y, Z], (1, 3, 1), 2),
        ([torch.arange(9), torch.arange(9) + 9], (1, 1), 8),  # in parts of two rows: the last have none
        ([{"x": X, "y": Y}, {"x": X, "y": Z}], (1, 1), 2),
        ([{"x": torch.ones(6), "y": Y}, {"x": torch.ones(6), "y": Z}], (1, 1), 2),
    ],
)
def test_batches_that_differ_in_one_tensor_are_taken_and_equal_ones_refused(
    batches: list[Any], microbatches: tuple[int, ...], parts: int
) -> None:
    refuse(batches, microbatches, parts)
    with pytest.raises(ValueError, match="batch"):
        refuse(batches[:1] * len(batches), microbatches, parts)
