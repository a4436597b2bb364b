"""One change of a right plan for each hypothesis of the diagnoser; changes that look alike are both named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lockstep.layouts import Layout
from suites.selftest.layouts.model import HeadUnreduced, Plan, PlanWithStep
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
def test_a_mean_that_may_be_a_sum_and_a_factor_is_said_to_be_either(layout: Layout) -> None:
    mean = "equals the reference after a mean over dp: that reduction is missing"
    twice = (
        "is wrong twice: after a sum over dp, which is missing, it is 2 times the reference: multiplied by"
    )
    sentence = f"gradient of `head.weight` {mean}, or {twice} dp, or tp (2) once too often"
    assert report(layout, "over tp", HeadUnreduced)[1] == sentence
