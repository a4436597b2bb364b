"""Wrong total norms of plans on layouts, and right norms of wrong gradients."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.layouts import Layout
from lockstep.layouts.norms import _Norm
from suites.selftest.layouts.model import SHARDS, HeadUnreduced, PlanWithNorm
from suites.selftest.layouts.test_planted import report


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
def test_a_norm_that_counts_replicas_names_the_axes_that_have_them(layout: Layout) -> None:
    lines = report(layout, "all ranks", WithNorm)
    assert "counts what is replicated over tp (5 of 10), " not in lines[1]
    assert "4 times" in lines[1], lines
