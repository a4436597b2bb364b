"""Wrong total norms on layouts without ranks: each is computed from the squares that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from lockstep.layouts.moment import Held, Moment
from lockstep.layouts.norms import _Norm, _parts, explain_norm
from suites.selftest.layouts.model import OnPaper

PAPER = OnPaper(dp=2, tp=2)
"""Ranks 0 and 1 have dp 0, ranks 0 and 2 tp 0."""
VALUES = {
    "cut.weight": torch.tensor([3.0, 5.0]),
    "all.weight": torch.tensor([7.0]),
    "all.bias": torch.tensor([2.0]),
}


def moments(ranks: int = 4) -> dict[int, Moment]:
    """Return what ranks hold of one tensor that tp cuts, and of two that all have."""
    found = {}
    for rank in range(ranks):
        held = [
            Held(name, name, torch.tensor([rank % 2] if name == "cut.weight" else [0]), value[[rank % 2]])
            if name == "cut.weight"
            else Held(name, name, torch.tensor([0]), value)
            for name, value in VALUES.items()
        ]
        found[rank] = Moment(0, "gradients", "gradient", held)
    return found


def explained(square: Callable[[int], float], ranks: int = 4, layout: OnPaper = PAPER) -> str:
    """Return what is wrong with a norm of which each rank has the root of a number."""
    return explain_norm({rank: square(rank) ** 0.5 for rank in range(ranks)}, 1.0, moments(ranks), layout)


RIGHT = 9.0 + 25 + 49 + 4


def own(rank: int) -> float:
    return (9.0, 25.0)[rank % 2] + 49 + 4


NORMS: dict[str, tuple[Callable[[int], float], str]] = {
    "right": (lambda rank: RIGHT, "is that of the gradients that the ranks hold"),
    "own": (own, "lacks a sum over tp"),
    "all ranks": (
        lambda rank: 2 * (9.0 + 25) + 4 * 53,
        "counts what is replicated over dp and tp more than once",
    ),
    "dp": (lambda rank: 2 * own(rank), "counts what is replicated over dp more than once"),
    "tp": (lambda rank: 9.0 + 25 + 2 * 53, "counts what is replicated over tp more than once"),
    "bias": (lambda rank: RIGHT - 4, "leaves out `all.bias`"),
    "weights": (lambda rank: 4.0, "leaves out `*weight`"),
    "cut": (lambda rank: 53.0, "leaves out `cut.weight`"),
    "three": (lambda rank: RIGHT + 2 * 4, "counts `all.bias` 3 times"),
    "eight": (lambda rank: RIGHT + 7 * 49, "counts `all.weight` 8 times"),
    "first part": (
        lambda rank: 9.0 + 53,
        "counts of `cut.weight` the part of tp 0 alone, or counts of `*weight` the part of tp 0 alone",
    ),
    "no root": (lambda rank: RIGHT**2, "is a sum of squares, without the root"),
    "norms": (
        lambda rank: (math.sqrt(own(0)) + math.sqrt(own(1))) ** 2,
        "is a sum over tp of norms, not the root of a sum of squares",
    ),
    "tensors": (
        lambda rank: (math.sqrt(34) + 7 + 2) ** 2,
        "is a sum of the norms of tensors, not the root of a sum of squares",
    ),
    "half": (
        lambda rank: RIGHT / 4,
        "is 1/2 of the reference: divided by dp, or tp (2) once too often, or is the root of a sum of "
        "squares, which is 1/4 of the reference: divided by dp and tp (4) once too often",
    ),
    "squares twice": (
        lambda rank: RIGHT / 2,
        "is the root of a sum of squares, which is 1/2 of the reference: divided by dp, or tp (2) once too "
        "often",
    ),
    "nothing": (lambda rank: 1234.5, ""),
    "apart": (lambda rank: RIGHT / 4 if rank else RIGHT / 9, ""),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_explained_by_the_squares_of_ranks(name: str) -> None:
    square, text = NORMS[name]
    assert explained(square) == text


def test_the_largest_of_norms_is_named_with_what_may_be_alike() -> None:
    assert explained(lambda rank: own(1)) == (
        "is the largest of the norms along tp, not the root of a sum of squares, "
        "or is the largest of the norms along dp and tp, not the root of a sum of squares, "
        "or counts of `cut.weight` the part of tp 1 alone, or counts of `*weight` the part of tp 1 alone"
    )


def test_a_norm_that_is_close_to_right_is_not_explained() -> None:
    actual = dict.fromkeys(range(4), 1.0 + 5e-10)
    assert explain_norm(actual, 1.0, moments(), PAPER) == ""
    near = math.sqrt(RIGHT)
    assert explain_norm(dict.fromkeys(range(4), near), near * (1 + 5e-10), moments(), PAPER) == ""
    right = "is that of the gradients that the ranks hold"
    assert explain_norm(dict.fromkeys(range(4), near), near * 2, moments(), PAPER) == right
    assert explain_norm({0: near}, near * 2, moments(), PAPER) == right
    assert explain_norm({0: near, 1: near * 3}, near, moments(), PAPER) == ""


def test_only_what_a_rank_has_counts() -> None:
    held = [
        Held("none", "none", torch.tensor([0]), None),
        Held("padded", "padded", torch.tensor([-1, 4, 5]), torch.tensor([0.0, 3.0, 4.0])),
        Held("empty", "empty", torch.tensor([-1]), torch.tensor([0.0])),
    ]
    assert _parts(Moment(0, "", "gradient", held)) == {("padded", 4, 2): 25.0, ("empty", 0, 0): 0.0}


def norm(held: Mapping[int, Mapping[tuple[str, int, int], float]]) -> _Norm:
    return _Norm(dict.fromkeys(held, 1.0), held, PAPER)


def test_axes_cut_a_tensor_or_replicate_it() -> None:
    by_tp = norm({rank: {("cut", rank % 2, 1): 1.0, ("all", 0, 1): 1.0} for rank in range(4)})
    assert by_tp.names == ["cut", "all"]
    assert [by_tp.is_cut(name, axis) for name in ("cut", "all") for axis in ("dp", "tp")] == [
        False,
        True,
        False,
        False,
    ]
    of_one = norm(
        {rank: {("cut", rank, 1): 1.0} | ({("all", 0, 1): 1.0} if rank else {}) for rank in range(4)}
    )
    assert of_one.is_cut("all", "dp")
    assert of_one.is_cut("all", "tp")
    assert of_one.is_replicated("dp")
    apart = norm({rank: {("cut", rank, 1): 1.0} for rank in range(4)})
    assert not apart.is_replicated("dp")
    assert not apart.is_replicated("tp")
    only_dp = norm({rank: {("cut", rank % 2, 1): 1.0} for rank in range(4)})
    assert (only_dp.is_replicated("dp"), only_dp.is_replicated("tp")) == (True, False)


def test_of_replicas_that_differ_a_rank_sees_the_nearest() -> None:
    of = norm({rank: {("all", 0, 1): 10.0**rank, ("cut", rank, 1): 0.5} for rank in range(4)})
    assert [of.seen(rank, ["dp", "tp"], ["all"]) for rank in range(4)] == [1.0, 10.0, 100.0, 1000.0]
    assert of.seen(0, ["dp", "tp"]) == 1.0 + 4 * 0.5
    assert of.seen(0, ["dp"]) == 1.0 + 2 * 0.5
    assert of.seen(3, [], ["cut"]) == 0.5
    assert [of._distance(0, rank) for rank in range(4)] == [0, 1, 1, 2]
    first = _Norm(dict.fromkeys(range(4), (1.0 + 2) ** 0.5), of.held, PAPER)
    assert not first.fits(first.totals)
    assert first.fits_replicas_of_others()
    some = _Norm({rank: (10.0**rank + 2) ** 0.5 for rank in (1, 2)}, of.held, PAPER)
    assert some.fits(some.totals)
    assert not some.fits_replicas_of_others()


def test_a_lack_of_sums_is_named_by_the_fewest_axes() -> None:
    held = {rank: {("w", rank, 1): float(2**rank)} for rank in range(4)}
    own = _Norm({rank: float(2**rank) ** 0.5 for rank in range(4)}, held, PAPER)
    assert list(own.lacking()) == ["lacks a sum over dp and tp"]
    of_dp = _Norm({rank: (held[rank % 2][("w", rank % 2, 1)] * 5) ** 0.5 for rank in range(4)}, held, PAPER)
    assert list(of_dp.lacking()) == ["lacks a sum over tp"]
