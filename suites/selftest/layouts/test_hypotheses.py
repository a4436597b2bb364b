"""One change of a right plan for each hypothesis of the diagnoser; changes that look alike are both named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lockstep.layouts import Layout
from lockstep.layouts.diagnosis import _CAUSES, Failure, describe
from lockstep.layouts.moment import Moment
from lockstep.layouts.norms import _Norm
from lockstep.layouts.reference import Blocks
from lockstep.layouts.shards import PADDING
from lockstep.layouts.suspect import Suspect
from lockstep.layouts.weights import Weighing
from lockstep.recorders.tensors import short
from suites.selftest.layouts.model import SHARDS, OnPaper, Plan, PlanWithNorm, PlanWithStep
from suites.selftest.layouts.test_planted import report

Change = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns a gradient changed, by itself and the rank."""


def as_mask(gradient: torch.Tensor) -> torch.Tensor:
    return (torch.arange(gradient.numel()) % 2).view_as(gradient).to(gradient.dtype)


GRADIENTS: dict[str, tuple[Change, str]] = {
    "max": (
        lambda g, rank: g - (as_mask(g) if rank else 1 - as_mask(g)),
        "equals the reference after a max over dp: that reduction is missing",
    ),
    "mean": (
        lambda g, rank: g + (1 - 2 * rank) * as_mask(g),
        "equals the reference after a mean over dp: that reduction is missing",
    ),
    "sum of shares": (
        lambda g, rank: g * (0.25 + 0.5 * rank),
        "equals the reference after a sum over dp: that reduction is missing, or "
        "is 0.25 times the reference on rank 0, 0.75 times the reference on rank 1",
    ),
    "factors": (
        lambda g, rank: g * (2 + rank),
        "is 2 times the reference on rank 0, 3 times the reference on rank 1",
    ),
    "zero at 1": (
        lambda g, rank: g * (1 - rank),
        "equals the reference after a sum over dp: that reduction is missing, or "
        "is right at dp 0 alone: replicas differ",
    ),
    "zero": (lambda g, rank: g * 0, "is zero on all ranks"),
    "rows": (
        lambda g, rank: g.flip(0),
        "has the reference's values along dim 0 in another order: a packed weight cut whole, perhaps",
    ),
    "float32": (lambda g, rank: g.float().double(), "is the reference rounded to float32"),
    "noise": (
        lambda g, rank: g + as_mask(g) * 1e-3,
        "differs; no single reduction, factor or part explains it",
    ),
    "noise by rank": (
        lambda g, rank: g + as_mask(g) * 1e-3 * (1 + rank),
        "differs; no single reduction, factor or part explains it",
    ),
}


class Changed(Plan):
    """A plan that changes a gradient after all reductions."""

    def reduce(self) -> None:
        super().reduce()
        for name, each in self.model.named_parameters():
            if name == "out.weight":
                each.grad = self.change(each.grad)

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return GRADIENTS[self.bug][0](gradient, self.layout.rank)


@pytest.mark.parametrize("bug", GRADIENTS)
@pytest.mark.layouts(dp=(1, 2))
def test_a_changed_gradient_is_explained(layout: Layout, bug: str) -> None:
    lines = report(layout, bug, Changed)
    assert f"gradient of `out.weight` {GRADIENTS[bug][1]}" in lines, lines


class OfOnePart(Plan):
    """A plan in which all tp ranks have the gradient of the first one's part."""

    def reduce(self) -> None:
        super().reduce()
        torch.distributed.broadcast(self.model.up.weight.grad, 0)


@pytest.mark.layouts(tp=(1, 2))
def test_the_part_of_another_rank_is_named(layout: Layout) -> None:
    lines = report(layout, "", OfOnePart)
    assert lines[1] == "gradient of `up.weight` is the part of tp 0 on all ranks of tp"


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


def gradient(values: dict[int, torch.Tensor], **changes: Any) -> list[str]:
    return held(ONES, values, **{"microbatches": 1, **changes}).explanations()


def parameter(values: dict[int, torch.Tensor], **changes: Any) -> list[str]:
    return held(ONES, values, "parameter", **{"microbatches": 1, **changes}).explanations()


ALL = range(4)
OTHER = torch.tensor([3.0, 1.0, -1.0, 2.0])


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


class LeftInReduced(Plan):
    """A plan that adds local gradients to reduced ones of the step before, and reduces both."""

    def reduce(self) -> None:
        for name, each in self.model.named_parameters():
            each.grad += self.kept.get(name, 0)
        super().reduce()
        self.kept = {name: each.grad.clone() for name, each in self.model.named_parameters()}


@pytest.mark.layouts(dp=(1, 2))
def test_a_gradient_left_in_before_a_reduction_is_named(layout: Layout) -> None:
    lines = report(layout, "", LeftInReduced)
    times = "is the reference plus 2 times that of the step before: left in, not zeroed"
    assert lines[1] == f"gradient of `head.bias` (and 9 more of 10) {times}"


class FastPlan(PlanWithStep):
    def __init__(self, model: torch.nn.Module, layout: Layout, bug: str = "") -> None:
        super().__init__(model, layout, bug)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, 0.9)


@pytest.mark.layouts(dp=(1, 2))
def test_a_parameter_that_moves_too_far_is_named(layout: Layout) -> None:
    lines = report(layout, "", FastPlan)
    assert lines[1].startswith("parameter of `head.bias` (and 9 more of 10) moved as far as 2 times the"), (
        lines
    )


class TwoBugs(Plan):
    """A plan of which gradients lack a sum and have a factor."""

    def reduce(self) -> None:
        for each in self.model.parameters():
            each.grad *= 3


@pytest.mark.layouts(dp=(1, 2))
def test_a_missing_sum_and_a_factor_are_both_named(layout: Layout) -> None:
    cause = "is wrong twice: after a sum over dp, which is missing, it is 3 times the reference"
    assert report(layout, "", TwoBugs)[1] == f"gradient of `head.bias` (and 9 more of 10) {cause}"


class WithLoss(Plan):
    """A plan whose gradients are right, and its loss is not."""

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
        found = super().__call__(batch, microbatches)
        if self.bug == "loss doubled":
            return found * 2
        if self.bug == "nan":
            return found * math.nan
        if self.bug == "log":
            return found + math.log(2)
        return found * (self.layout.rank == 1)


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("loss doubled", "loss is 2 times the reference: multiplied by dp (2) once too often (5.97244, "),
        (
            "log",
            "loss is the reference plus log 2: a log-sum-exp counts dp (2) wrongly (3.67937, ",
        ),
        ("nan", "loss is not finite on ranks 0, 1 (nan, expected "),
        (
            "loss of one",
            "loss equals the reference after a sum over dp: that reduction is missing, or "
            "is right on rank 1 alone",
        ),
    ],
)
@pytest.mark.layouts(dp=(1, 2))
def test_a_wrong_loss_is_explained(layout: Layout, bug: str, cause: str) -> None:
    lines = report(layout, bug, WithLoss)
    assert lines[1].startswith(cause), lines
    assert len(lines) == 2


# Least squares over parts, without ranks


def weights(number: int) -> torch.Tensor:
    """Return unequal weights of so many blocks, which add up to 1."""
    found = torch.arange(number, dtype=torch.float64) * 0.37 % 1 + 0.5
    return found / found.sum()


def weighing(rows: int, sequence: int = 1, microbatches: int = 1, **axes: int) -> Weighing:
    """Return blocks of random gradients that have unequal weights in the whole batch."""
    generator = torch.Generator().manual_seed(0)
    number = rows * sequence
    found = torch.randn(number, 40, generator=generator, dtype=torch.float64)
    losses = tuple(torch.rand(number, generator=generator, dtype=torch.float64).tolist())
    blocks = Blocks(rows, sequence, (), losses, {"w": found}, {"w": weights(number) @ found})
    return Weighing(blocks, axes, {**axes, **({"cp": sequence} if sequence > 1 else {})}, microbatches)


def explained(of: Weighing, ratios: torch.Tensor) -> list[str]:
    """Return how a gradient is explained in which each block counts so many times."""
    assert of.blocks.weights is not None
    return of.explain({"w": (of.blocks.weights * ratios) @ of.blocks.gradients["w"]})


def kept(number: int, *lost: int) -> torch.Tensor:
    return torch.ones(number, dtype=torch.float64).index_fill(0, torch.tensor(lost), 0.0)


def test_a_lost_part_of_two_axes_of_one_size_is_that_of_either() -> None:
    of = weighing(4, dp=2, fsdp=2)
    assert explained(of, kept(4, 2, 3)) == ["lacks dp part 1 of 2", "lacks fsdp part 1 of 2"]
    assert explained(of, kept(4, 3)) == ["lacks dp part 1 with fsdp part 1"]


def test_a_lost_part_of_axes_of_two_sizes_is_named() -> None:
    of = weighing(8, dp=2, fsdp=4)
    assert explained(of, kept(8, 4, 5, 6, 7)) == ["lacks dp part 1 of 2"]
    assert explained(of, kept(8, 1, 5)) == ["lacks fsdp part 1 of 4"]


def test_lost_microbatches_of_one_rank_are_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    # Ranks may cut their microbatches, or each microbatch may be cut over ranks.
    both = ["lacks dp part 1 with microbatch 0", "lacks dp part 1 with microbatch 1"]
    assert explained(of, kept(6, 3)) == both
    assert explained(of, kept(6, 0, 3)) == ["lacks microbatch 0 of 3"]
    assert explained(of, kept(6, 0, 1, 3, 4) * 3) == [
        "lacks microbatches 0, 1 of 3, and counts the others 3 times"
    ]


def test_a_mean_over_ranks_and_microbatches_is_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    assert of.blocks.weights is not None
    (found,) = explained(of, 1 / (6 * of.blocks.weights))
    assert found.startswith("is a mean of the means of each dp part and microbatch: they count alike")


def test_a_tensor_that_an_auxiliary_loss_does_not_reach_is_explained_alone() -> None:
    of = weighing(6, microbatches=3, dp=2)
    number = torch.arange(240, dtype=torch.float64).view(6, 40)
    found = {**of.blocks.gradients, "router": number.sin()}
    whole = {**of.blocks.whole, "router": number.cos().sum(0)}  # no sum over blocks
    of = replace(of, blocks=replace(of.blocks, gradients=found, whole=whole))
    assert of.blocks.weights is None
    lost = {"w": torch.tensordot(torch.tensor([1.0, 1, 0, 1, 1, 0]).double() * weights(6), found["w"], 1)}
    assert of.explain(lost) == ["lacks microbatch 2 of 3"]
    assert of.explain({**lost, "router": whole["router"] / 2}) == []


def test_a_part_is_lost_with_what_a_term_adds_to_it() -> None:
    of = weighing(6, microbatches=3, dp=2)
    base, whole = of.blocks.gradients["w"], of.blocks.whole["w"]
    term = replace(of.blocks, gradients={"w": base.cos()}, whole={"w": base.cos().mean(0)})
    stacked = {"w": torch.cat([base, term.whole["w"][None]])}
    losses = (*of.blocks.losses, 1.0)
    blocks = replace(
        of.blocks, terms=("z",), losses=losses, gradients=stacked, whole={"w": whole + term.whole["w"]}
    )
    of = replace(of, blocks=blocks)
    lost = kept(6, 1, 4)
    wrong = {"w": (lost * weights(6)) @ base + lost @ base.cos() / 6}
    assert of.explain(wrong) == []
    assert of.explain({"w": (lost * weights(6)) @ base + term.whole["w"]}) == ["lacks microbatch 1 of 3"]
    assert of.explain({"w": (lost * weights(6)) @ base + 2 * term.whole["w"]}) == []  # two things are wrong
    joined = of.with_terms([term])
    assert joined is not None
    assert joined.explain(wrong) == ["lacks microbatch 1 of 3"]
    of_both = (weights(6) + 1 / 6) * torch.tensor(losses[:6], dtype=torch.float64)
    assert joined.blocks.losses == pytest.approx(of_both.tolist(), rel=1e-9)
    assert of.with_terms([replace(term, whole={"w": whole.sin()})]) is None


def with_term() -> tuple[Weighing, Weighing]:
    """Return the blocks of a loss that has a term, and those of the term."""
    of = weighing(6, microbatches=3, dp=2)
    base = of.blocks.gradients["w"]
    parts, share = base.cos(), weights(6).flip(0)
    term = replace(of, blocks=replace(of.blocks, gradients={"w": parts}, whole={"w": share @ parts}))
    whole = {"w": of.blocks.whole["w"] + term.blocks.whole["w"]}
    stacked = {"w": torch.cat([base, term.blocks.whole["w"][None]])}
    losses = (*of.blocks.losses, 1.0)
    blocks = replace(of.blocks, terms=("z",), losses=losses, gradients=stacked, whole=whole)
    return replace(of, blocks=blocks), term


def test_a_term_of_the_loss_that_is_wrong_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of, term = with_term()
    monkeypatch.setattr(Failure, "_weighing", lambda self, name: term if name else of)
    failure = Failure(OnPaper(dp=2), SHARDS, cast(Any, None), 3, {}, {})
    lost = (kept(6, 1, 4) * weights(6).flip(0)) @ term.blocks.gradients["w"]
    gradient = of.blocks.whole["w"] - term.blocks.whole["w"] + lost
    assert failure.explain({"w": gradient}) == [
        "has a wrong term `z` of the loss, which lacks microbatch 1 of 3"
    ]


def test_a_loss_without_a_term_is_named() -> None:
    of, _ = with_term()
    whole = float(weights(6) @ torch.tensor(of.blocks.losses[:6], dtype=torch.float64))
    assert of.explain_loss(whole) == ["lacks the term `z` of the loss"]
    assert of.explain_loss(whole + 2) == [
        "has the term `z` of the loss as 2 times the reference: multiplied by dp (2) once too often"
    ]


def test_of_many_complaints_the_first_are_shown() -> None:
    moments = {
        0: Moment(0, "before step 0", "parameter", complaints=[f"{number} is wrong" for number in range(9)])
    }
    text = describe(Failure(OnPaper(dp=2), SHARDS, cast(Any, None), 1, moments, {}))
    assert text.splitlines()[1] == "  0 is wrong (rank 0)"
    assert text.splitlines()[-1] == f"  and {9 - _CAUSES} more"


def test_parts_that_count_at_random_are_not_named() -> None:
    of = weighing(4, sequence=2, dp=4)
    assert explained(of, torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)) == []


def test_a_loss_without_a_part_is_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    assert of.blocks.weights is not None
    shares = of.blocks.weights * torch.tensor(of.blocks.losses, dtype=torch.float64)
    assert of.explain_loss(float(shares[:3].sum())) == ["lacks dp part 1 of 2"]
    assert of.explain_loss(float(shares[[0, 3]].sum())) == ["lacks microbatches 1, 2 of 3"]
    assert of.explain_loss(float(shares.sum()) * 1.01) == []


def test_the_loss_of_blocks_that_count_as_in_gradients_is_known() -> None:
    of = weighing(4, dp=2, fsdp=2)
    assert of.blocks.weights is not None
    found = of.blocks.weights * torch.tensor([1.0, 2, 0, 3], dtype=torch.float64)
    loss = float(found @ torch.tensor(of.blocks.losses, dtype=torch.float64))
    assert of.loss_of({"w": found @ of.blocks.gradients["w"]}) == pytest.approx(loss, rel=1e-9)
    assert math.isnan(of.loss_of({"w": torch.ones(40, dtype=torch.float64)}))


class WithNorm(PlanWithNorm):
    """A plan with a norm that is wrong in one of several ways."""

    def grad_norm(self) -> torch.Tensor:
        cut, whole = 0.0, 0.0
        for name, each in self.model.named_parameters():
            square = each.grad.square().sum()
            if self.bug == "first part" and name == "down.weight" and self.layout.at("tp"):
                continue
            if self.bug == "one alone" and name == "down.weight" and self.layout["tp"] > 1:
                whole += square
            elif SHARDS.rule(name):
                cut += square
            else:
                whole += square * (2 if self.bug == "one twice" and name == "embed.weight" else 1)
        if self.bug == "norms" and self.layout["tp"] > 1:
            total = (cut + whole).sqrt()
            torch.distributed.all_reduce(total, group=self.layout.group("tp"))
            return total
        own = cut + whole
        if self.layout["tp"] > 1:
            torch.distributed.all_reduce(cut, group=self.layout.group("tp"))
        total = cut + whole
        if self.bug == "largest":
            torch.distributed.all_reduce(total := own, torch.distributed.ReduceOp.MAX)
        if self.bug == "all ranks":
            torch.distributed.all_reduce(total := whole.clone())
            total = total + cut
        return total if self.bug == "no root" else total.sqrt()


NORMS = {
    "norms": "is a sum over tp of norms, not the root of a sum of squares",
    "largest": "is the largest of the norms along tp, not the root of a sum of squares, or "
    "counts of what is cut over tp (5 of 10) the part of tp 0 alone",
    "no root": "is a sum of squares, without the root",
    "one alone": "lacks a sum over tp of `down.weight`",
    "first part": "counts of `down.weight` the part of tp 0 alone",
    "one twice": "counts `embed.weight` 2 times",
}


@pytest.mark.parametrize("bug", NORMS)
@pytest.mark.layouts(tp=(1, 2))
def test_a_wrong_norm_is_explained(layout: Layout, bug: str) -> None:
    lines = report(layout, bug, WithNorm)
    assert lines[1].startswith(f"total norm {NORMS[bug]} ("), lines


@pytest.mark.layouts(tp=(2,))
def test_tensors_of_two_kinds_are_named_by_both(layout: Layout) -> None:
    """The biases, and what is replicated, are the same ones: either may be what a norm leaves out."""
    held = {
        rank: {
            ("a.weight", rank, 1): 1.0,
            ("b.weight", rank, 1): 2.0,
            ("a.bias", 0, 1): 4.0,
            ("b.bias", 0, 1): 8.0,
        }
        for rank in range(2)
    }
    norm = _Norm(dict.fromkeys(held, math.sqrt(2 * (1 + 2))), held, layout)
    assert list(norm.misjudged()) == ["leaves out `*bias`, or what is replicated over tp (2 of 4)"]


class WithHalfGradients(PlanWithNorm):
    """A plan of which gradients are half as large, too."""

    def reduce(self) -> None:
        super().reduce()
        for each in self.model.parameters():
            each.grad /= 2


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("norm omits", "leaves out `embed.weight`"),
        ("norm of this rank", "lacks a sum over tp"),
        ("", "is that of the gradients that the ranks hold"),
    ],
)
@pytest.mark.layouts(tp=(1, 2))
def test_the_norm_of_wrong_gradients_is_explained(layout: Layout, bug: str, cause: str) -> None:
    lines = report(layout, bug, WithHalfGradients)
    assert lines[1].endswith("is 1/2 of the reference: divided by tp (2) once too often"), lines
    assert lines[2].startswith(f"total norm {cause} ("), lines


class HeadUnreduced(PlanWithNorm):
    """A plan with a gradient that is not reduced over dp, or over tp in its place."""

    def reduce(self) -> None:
        own = self.model.head.weight.grad.clone()
        super().reduce()
        if self.bug == "over tp":
            torch.distributed.all_reduce(own, group=self.layout.group("tp"))
        self.model.head.weight.grad = own


class WrongGroup(Plan):
    """A plan of which one gradient is reduced over tp, which cuts it, in place of dp."""

    def reduce(self) -> None:
        own = self.model.up.weight.grad.clone()
        super().reduce()
        torch.distributed.all_reduce(own, group=self.layout.group("tp"))
        self.model.up.weight.grad = own


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_a_reduction_over_the_wrong_group_is_named(layout: Layout) -> None:
    cause = "is summed over tp, which cuts it, in place of dp"
    assert report(layout, "", WrongGroup)[1] == f"gradient of `up.weight` {cause}"


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_the_norm_of_replicas_that_differ_is_that_of_each_rank(layout: Layout) -> None:
    lines = report(layout, "", HeadUnreduced)
    cause = "equals the reference after a sum over dp: that reduction is missing"
    assert lines[1] == f"gradient of `head.weight` {cause}"
    assert lines[2].startswith("total norm is that of the gradients that the ranks hold ("), lines


class HeadOfFirst(HeadUnreduced):
    """Its norm counts each replica once, and takes that of dp 0."""

    def grad_norm(self) -> torch.Tensor:
        total = super().grad_norm()
        torch.distributed.broadcast(total, group=self.layout.group("dp"), group_src=0)
        return total


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_a_norm_may_have_the_replicas_of_one_rank(layout: Layout) -> None:
    lines = report(layout, "", HeadOfFirst)
    assert lines[2].startswith("total norm is that of the gradients that the ranks hold ("), lines


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_a_mean_that_may_be_a_sum_and_a_factor_is_said_to_be_either(layout: Layout) -> None:
    mean = "equals the reference after a mean over dp: that reduction is missing"
    twice = (
        "is wrong twice: after a sum over dp, which is missing, it is 2 times the reference: multiplied by"
    )
    sentence = f"gradient of `head.weight` {mean}, or {twice} dp, or tp (2) once too often"
    assert report(layout, "over tp", HeadUnreduced)[1] == sentence


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_a_norm_that_counts_replicas_names_the_axes_that_have_them(layout: Layout) -> None:
    lines = report(layout, "all ranks", WithNorm)
    assert "counts what is replicated over tp (5 of 10), " not in lines[1]
    assert "4 times" in lines[1], lines
