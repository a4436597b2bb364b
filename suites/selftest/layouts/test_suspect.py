"""A wrong tensor without ranks, explained by the values that ranks hold of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.layouts.shards import PADDING
from lockstep.layouts.suspect import Suspect
from lockstep.recorders.tensors import short
from suites.selftest.layouts.model import OnPaper


def held(
    whole: torch.Tensor, values: dict[int, torch.Tensor], kind: str = "gradient", **changes: Any
) -> Suspect:
    """Return a wrong tensor of 4 ranks, each of which has all of it, or the region given."""
    regions = changes.pop("regions", dict.fromkeys(values, torch.arange(whole.numel()).view_as(whole)))
    layout = changes.pop("layout", OnPaper(dp=2, tp=2))
    return Suspect(
        "w",
        kind,
        layout,
        whole.double(),
        {rank: each.double() for rank, each in values.items()},
        regions,
        **changes,
    )


ONES = torch.tensor([1.0, -2.0, 4.0, 0.5])
HALVES = {rank: torch.arange(2) + rank % 2 * 2 for rank in range(4)}
"""The regions of ranks where tp cuts a tensor in two."""


def parts(values: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the half that each rank has of a tensor that tp cuts."""
    return {rank: values[region] for rank, region in HALVES.items()}


def gradient(values: dict[int, torch.Tensor], **changes: Any) -> list[str]:
    return held(ONES, values, **{"microbatches": 1, **changes}).explanations()


def parameter(values: dict[int, torch.Tensor], **changes: Any) -> list[str]:
    return held(ONES, values, "parameter", **{"microbatches": 1, **changes}).explanations()


ALL = range(4)
OTHER = torch.tensor([3.0, 1.0, -1.0, 2.0])


def test_the_part_of_another_rank_is_named_by_the_axis_of_that_rank() -> None:
    regions = {rank: torch.arange(2) + 2 * rank for rank in range(4)}
    whole = torch.arange(1.0, 9.0)
    values = {rank: whole[regions[rank - rank % 2]] for rank in regions}
    found = Suspect("weight", "gradient", OnPaper(fsdp=2, tp=2), whole, values, regions, 1).explanations()
    assert "is the part of tp 0 on all ranks of tp" in found


def explanations(
    whole: torch.Tensor,
    values: dict[int, torch.Tensor],
    regions: dict[int, torch.Tensor],
    earlier: tuple[torch.Tensor, ...] = (),
    **axes: int,
) -> list[str]:
    """Return how a wrong gradient is explained that ranks hold so."""
    return Suspect("w", "gradient", OnPaper(**axes), whole, values, regions, 1, earlier).explanations()


def test_a_sum_over_the_ranks_that_share_a_part_is_named() -> None:
    regions = {rank: torch.arange(4) + rank // 2 * 4 for rank in range(4)}
    whole = torch.arange(1.0, 9.0)
    share = torch.tensor([1.0, -2.0, 4.0, 0.5])
    values = {rank: whole[regions[rank]] / 2 + (share if rank % 2 else -share) for rank in regions}
    assert explanations(whole, values, regions, tp=4) == [
        "equals the reference after a sum over the ranks of tp that hold the same part: "
        "that reduction is missing"
    ]


def test_parts_that_went_round_are_those_of_another_rank() -> None:
    regions = {rank: torch.arange(2) + 2 * rank for rank in range(3)}
    whole = torch.tensor([1.0, 5.0, 2.0, -3.0, 7.0, 4.0])
    values = {rank: whole[regions[(rank + 1) % 3]] for rank in regions}
    assert "is the part of another rank of tp" in explanations(whole, values, regions, tp=3)


def test_the_gradient_of_the_step_before_is_named() -> None:
    regions = dict.fromkeys(range(2), torch.arange(4))
    whole, before = torch.tensor([1.0, 5.0, 2.0, -3.0]), torch.tensor([2.0, 1.0, -4.0, 6.0])
    values = dict.fromkeys(range(2), before)
    assert explanations(whole, values, regions, (before,), dp=2) == ["is that of the step before"]


@pytest.mark.parametrize("size", [1, 2])
def test_of_a_single_number_only_a_product_of_sizes_is_a_factor(size: int) -> None:
    def explained(value: float) -> list[str]:
        held = dict.fromkeys(range(size), torch.tensor([value]))
        return explanations(torch.tensor([3.0]), held, dict.fromkeys(held, torch.arange(1)), dp=2)

    assert explained(4.1) == []
    assert explained(6.0) == ["is 2 times the reference: multiplied by dp (2) once too often"]


def test_the_error_is_the_largest_on_any_rank() -> None:
    found = held(ONES, {0: ONES, 1: ONES - torch.tensor([0, 3.0, 1, 0])}, microbatches=1)
    assert (found.error, found.scale) == (3.0, 4.0)
    assert held(ONES, {0: ONES, 1: ONES * math.nan}, microbatches=1).error == math.inf
    assert held(ONES * 0, {0: ONES}, microbatches=1).scale == 1.0


def test_a_tensor_is_put_together_where_replicas_agree_on_all_of_it() -> None:
    right = held(ONES, parts(ONES + 1), regions=HALVES, microbatches=1)
    assert right.assembled is not None
    assert right.assembled.tolist() == (ONES + 1).tolist()
    apart = {**parts(ONES), 3: ONES[2:] + 1}
    assert held(ONES, apart, regions=HALVES, microbatches=1).assembled is None
    lacking = {rank: each for rank, each in parts(ONES).items() if rank % 2}
    assert held(ONES, lacking, regions=HALVES, microbatches=1).assembled is None
    padded = {0: torch.tensor([0, 1, PADDING]), 1: torch.tensor([2, 3, PADDING])}
    with_padding = {0: torch.tensor([3.0, 4, 0]), 1: torch.tensor([5.0, 6, 0])}
    found = held(ONES, with_padding, regions=padded, layout=OnPaper(tp=2), microbatches=1).assembled
    assert found is not None
    assert found.tolist() == [3, 4, 5, 6]


def test_axes_along_which_ranks_hold_the_same_or_other_elements_are_known() -> None:
    found = held(ONES, parts(ONES), regions=HALVES, microbatches=1)
    assert (found.replicated, found.cutting) == (["dp"], ["tp"])
    assert list(found.groups(["dp"])) == [[0, 2], [1, 3]]
    of_two = held(ONES, {0: ONES, 1: ONES}, microbatches=1)
    assert (of_two.replicated, of_two.cutting) == (["tp"], [])
    assert list(of_two.groups(["dp"])) == [[0], [1]]
    of_three = {0: ONES, 1: ONES, 2: ONES}
    assert held(ONES, of_three, microbatches=1).replicated == []
    some = {rank: region for rank, region in HALVES.items() if rank < 3}
    cut = {rank: ONES[region] for rank, region in some.items()}
    assert held(ONES, cut, regions=some, microbatches=1).cutting == []
    uneven = {0: torch.arange(3), 1: torch.arange(1) + 3}
    of_tp = held(ONES, {0: ONES[:3], 1: ONES[3:]}, regions=uneven, layout=OnPaper(tp=2), microbatches=1)
    assert (of_tp.replicated, of_tp.cutting) == ([], [])
    assert not of_tp.is_same_along(of_tp.values, "tp")


def test_values_are_reduced_over_the_ranks_of_an_axis() -> None:
    found = held(ONES, {rank: ONES * (rank + 1) for rank in range(4)}, microbatches=1)
    for op, factors in (("sum", (4, 6, 4, 6)), ("mean", (2, 3, 2, 3)), ("max", (3, 4, 3, 4))):
        reduced = found.reduced(found.values, ["dp"], op)
        assert [float(reduced[rank][0]) for rank in range(4)] == list(factors)
        assert reduced[0].shape == ONES.shape


def test_values_that_are_not_finite_are_said_first() -> None:
    assert gradient({0: ONES * 0, 1: ONES * math.inf, 2: ONES * 0, 3: ONES * math.nan}) == [
        "is not finite on ranks 1, 3"
    ]


def test_zeros_are_said_where_all_ranks_have_them() -> None:
    assert gradient(dict.fromkeys(ALL, ONES * 0)) == ["is zero on all ranks"]
    assert "is zero on all ranks" not in gradient({rank: ONES * (rank > 0) for rank in ALL})


def test_zeros_on_some_ranks_are_no_factor() -> None:
    assert parameter({rank: ONES * (rank > 0) for rank in ALL}) == [
        "is right on ranks 1, 2, 3 alone: replicas differ"
    ]
    assert parameter({rank: ONES * 2 * (rank > 0) for rank in ALL}) == [
        "is 0 times the reference on rank 0, 2 times the reference on ranks 1, 2, 3"
    ]


def test_noise_on_parts_is_no_reduction() -> None:
    noise = torch.tensor([0.25, -0.125])
    wrong = {rank: ONES[HALVES[rank]] + noise * (rank + 1) for rank in ALL}
    assert gradient(wrong, regions=HALVES) == []
    of_four = {rank: torch.arange(2) + rank // 2 * 2 for rank in ALL}
    wrong = {rank: ONES[of_four[rank]] + noise * (rank + 1) for rank in ALL}
    assert gradient(wrong, regions=of_four, layout=OnPaper(tp=4)) == []


def test_a_part_that_some_ranks_share_is_summed_over_these() -> None:
    regions = {rank: torch.arange(2) + rank // 2 * 2 for rank in range(3)}
    values = {0: ONES[:2] + OTHER[:2], 1: -OTHER[:2], 2: ONES[2:]}
    assert gradient(values, regions=regions, layout=OnPaper(tp=3)) == [
        "equals the reference after a sum over the ranks of tp that hold the same part: "
        "that reduction is missing",
    ]


def test_right_and_wrong_ranks_are_named_by_their_coordinate() -> None:
    assert parameter({rank: ONES if rank % 2 else OTHER for rank in ALL}) == [
        "is right at tp 1 alone: replicas differ"
    ]
    of_3 = OnPaper(dp=3)
    assert parameter({0: OTHER, 1: ONES, 2: ONES}, layout=of_3) == ["is wrong at dp 0: replicas differ"]
    assert parameter({rank: OTHER if rank < 3 else ONES for rank in ALL}) == [
        "is right on rank 3 alone: replicas differ"
    ]
    in_parts = {**parts(ONES), 0: OTHER[:2]}
    assert parameter(in_parts, regions=HALVES) == ["is right on ranks 1, 2, 3 alone: replicas differ"]
    nowhere = {**parts(ONES), 0: OTHER[:2], 2: OTHER[:2]}
    assert parameter(nowhere, regions=HALVES) == []


def test_the_factors_of_ranks_are_named_but_for_1() -> None:
    factors = (1, 2, 2, 0)
    assert parameter({rank: ONES * factors[rank] for rank in ALL}) == [
        "is 2 times the reference on ranks 1, 2, 0 times the reference on rank 3",
        "is right on rank 0 alone: replicas differ",
    ]
    assert parameter({rank: ONES * factors[rank] if rank else OTHER for rank in ALL}) == []


def test_a_factor_is_named_with_the_sizes_of_axes_and_microbatches() -> None:
    thrice = "is 3 times the reference: multiplied by the number of microbatches (3) once too often"
    assert gradient(dict.fromkeys(ALL, ONES * 3), microbatches=3) == [thrice]
    assert gradient(dict.fromkeys(ALL, ONES * -5), microbatches=3) == ["is -5 times the reference"]


def test_reductions_over_two_axes_are_named() -> None:
    shares = {
        rank: ONES * weight + OTHER * other
        for rank, (weight, other) in enumerate([(0.5, 1), (0.25, 2), (0.125, -4), (0.125, 1)])
    }
    assert gradient(shares)[0] == "equals the reference after a sum over dp and tp: that reduction is missing"
    twice = {rank: each * 2 for rank, each in shares.items()}
    assert gradient(twice) == [
        "equals the reference after a sum over dp and a mean over tp: that reduction is missing",
        "equals the reference after a mean over dp and a sum over tp: that reduction is missing",
    ]
    thrice = {rank: each * 3 for rank, each in shares.items()}
    assert gradient(thrice) == [
        "is wrong twice: after a sum over dp and tp, which is missing, it is 3 times the reference"
    ]
    assert gradient({rank: each * 4 for rank, each in shares.items()}) == [
        "equals the reference after a mean over dp and tp: that reduction is missing"
    ]


def test_a_mean_that_may_be_a_sum_and_a_product_of_other_sizes_is_both() -> None:
    values = {rank: ONES + OTHER * (1 if rank < 2 else -1) for rank in ALL}
    mean = "equals the reference after a mean over dp: that reduction is missing"
    assert gradient(values) == [
        mean,
        "is wrong twice: after a sum over dp, which is missing, it is 2 times the reference: "
        "multiplied by dp, or tp (2) once too often",
    ]
    assert gradient({0: values[0], 1: values[3]}, layout=OnPaper(dp=2)) == [mean]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_reduction_over_what_cuts_a_tensor_is_named(op: str) -> None:
    total = (ONES[:2] + ONES[2:]) / (2 if op == "mean" else 1)
    assert f"is the {op} of the parts of all ranks of tp: reduced over what cuts it" in gradient(
        dict.fromkeys(ALL, total), regions=HALVES
    )


def test_a_sum_over_a_wrong_axis_is_named_with_both() -> None:
    mine = {rank: ONES[HALVES[rank]] / 2 + (OTHER[:2] if rank < 2 else -OTHER[:2]) for rank in ALL}
    wrong = {rank: mine[rank] + mine[rank ^ 1] for rank in ALL}
    assert gradient(wrong, regions=HALVES) == ["is summed over tp, which cuts it, in place of dp"]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")]
)
def test_a_tensor_with_the_digits_of_a_dtype_is_named(dtype: torch.dtype, name: str) -> None:
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0]).double() / 3
    rounded = whole.to(dtype).double()
    (found,) = held(whole, dict.fromkeys(ALL, rounded), microbatches=1).explanations()
    assert found == f"is the reference rounded to {short(dtype)}"
    for number in (1, 3):
        few = held(whole[:number], {0: rounded[:number]}, layout=OnPaper(dp=2), microbatches=1)
        assert few.explanations() == []
    far = rounded + torch.tensor([0.0, 0, 0, 0.5])
    assert held(whole, dict.fromkeys(ALL, far), microbatches=1).explanations() == []


def test_gradients_left_in_from_several_steps_are_named() -> None:
    earlier = (OTHER.double(), OTHER.double().flip(0) + 0.25)
    left = "is the reference plus {}: left in, not zeroed"
    for added, words in (
        (earlier[0], "that of the step before"),
        (earlier[0] / 2, "0.5 times that of the step before"),
        (earlier[0] + earlier[1], "those of the 2 steps before"),
    ):
        assert gradient(dict.fromkeys(ALL, ONES + added), earlier=earlier) == [left.format(words)]
    assert gradient(dict.fromkeys(ALL, ONES + earlier[0] * 3), earlier=earlier) == []
    assert gradient(dict.fromkeys(ALL, earlier[1]), earlier=earlier) == []


def test_a_parameter_that_did_not_move_or_too_far_is_named() -> None:
    before = (OTHER.double(),)
    assert parameter(dict.fromkeys(ALL, OTHER), earlier=before) == [
        "did not move in this step: no optimizer has it"
    ]
    half = OTHER + (ONES - OTHER) / 2
    assert parameter(dict.fromkeys(ALL, half), earlier=before) == [
        "moved as far as 1/2 of the reference: divided by dp, or tp (2) once too often"
    ]
    assert parameter(dict.fromkeys(ALL, half)) == []
    assert gradient(dict.fromkeys(ALL, half), earlier=()) == []


def test_a_part_of_another_rank_is_named() -> None:
    swapped = {rank: ONES[HALVES[rank ^ 1]] for rank in ALL}
    assert parameter(swapped, regions=HALVES) == ["is the part of another rank of tp"]
    of_second = dict.fromkeys(ALL, ONES[2:])
    assert "is the part of tp 1 on all ranks of tp" in parameter(of_second, regions=HALVES)
    some = {**swapped, 3: OTHER[:2]}
    assert parameter(some, regions=HALVES) == []


def test_values_in_another_order_are_named_by_their_dim() -> None:
    whole = torch.tensor([[1.0, 5, 2], [7, -3, 4]])
    order = "has the reference's values along dim {} in another order: a packed weight cut whole, perhaps"
    for dim in range(2):
        (found,) = held(whole, dict.fromkeys(ALL, whole.flip(dim)), microbatches=1).explanations()
        assert found == order.format(dim)
    both = held(whole, dict.fromkeys(ALL, whole.flip(0).flip(1)), microbatches=1)
    assert both.explanations() == []
    assert gradient(dict.fromkeys(ALL, ONES.flip(0))) == [order.format(0)]
    assert held(torch.tensor(3.0), {0: torch.tensor(4.1)}, microbatches=1).explanations() == []
