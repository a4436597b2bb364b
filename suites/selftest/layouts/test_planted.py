"""Bugs planted in a right plan, one at a time: each report names the one that is there, at once."""

from __future__ import annotations

import pytest

from lockstep.layouts import Layout, assert_same_as_unsharded, keep_labels, witness_batches
from suites.selftest.layouts.model import (
    SHARDS,
    VOCAB,
    Plan,
    PlanWithNorm,
    PlanWithPenalty,
    PlanWithStep,
    build,
    loss,
    loss_with_penalty,
    penalty,
    plan_with,
)

BATCHES = witness_batches(VOCAB)


def report(layout: Layout, bug: str, kind: type[Plan] = Plan) -> list[str]:
    """Return the lines of the report on a plan with a bug."""
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(
            layout, build, plan_with(bug, kind), BATCHES, loss, shards=SHARDS, parts=keep_labels
        )
    return [line.strip() for line in str(caught.value).splitlines()]


OF_DATA = {
    "not reduced": "(and 9 more of 10) equals the reference after a sum over AXIS: that",
    "head not reduced": "`head.bias` (and 1 more of 10) equals the reference after a sum over AXIS",
    "divided": "(and 9 more of 10) is 1/2 of the reference: divided by AXIS (2) once too often",
    "mean of means": "is a mean of the means of each PART: they count alike, though",
    "left in": "is the reference plus that of the step before: left in, not zeroed",
    "one replica": "is right at AXIS 0 alone: replicas differ",
    "last microbatch": "lacks microbatches 0, 1 of 3",
    "mean of microbatches": "is a mean of the means of each microbatch",
    "lost part": "lacks PART 1 of 2",
    "not finite": "gradient of `head.bias` is not finite on rank 1",
    "no gradient": "gradient of `head.bias` is None, and that of the unsharded model is not (rank",
    "loss not reduced": "loss equals the reference after a sum over AXIS: that reduction is missing",
    "float32 scalar": "(and 9 more of 10) is 1 -2.0e-08 times the reference: float32 somewhere, perhaps",
    "float32 buffer": "buffer `scale` is float32: keep it in float64 (ranks 0, 1)",
    "renamed": "`bottom.weight` is no parameter of the unsharded model: rename it",
}


@pytest.mark.parametrize("bug", OF_DATA)
@pytest.mark.layouts(dp=(1, 2))
def test_a_bug_over_data_ranks_is_named(layout: Layout, bug: str) -> None:
    lines = report(layout, bug)
    assert OF_DATA[bug].replace("AXIS", "dp").replace("PART", "dp part") in lines[1], lines


@pytest.mark.parametrize("bug", ["not reduced", "divided", "mean of means", "lost part", "one replica"])
@pytest.mark.layouts(cp=(1, 2))
def test_a_bug_over_sequence_ranks_is_named(layout: Layout, bug: str) -> None:
    lines = report(layout, bug)
    assert OF_DATA[bug].replace("AXIS", "cp").replace("PART", "sequence part") in lines[1], lines


OF_TENSORS = {
    "no sum backward": "first divergence: the gradient of the output of `qkv`; all outputs agree",
    "no sum forward": "first divergence: the output of `up`",
    "bias on each rank": "first divergence: the output of `up`",
    "norm not reduced": "gradient of `norm.weight` equals the reference after a sum over",
    "reduced over what cuts": "gradient of `down.weight` is the sum of the parts of all ranks of tp",
    "packed weight cut whole": "parameter of `qkv.weight` has the reference's values along dim 0 in",
    "no bias": "tp2 is not the unsharded model: no rank has `up.bias`",
}


@pytest.mark.parametrize("bug", OF_TENSORS)
@pytest.mark.layouts(tp=(1, 2))
def test_a_bug_over_tensor_ranks_is_named(layout: Layout, bug: str) -> None:
    lines = report(layout, bug)
    assert OF_TENSORS[bug] in "\n".join(lines[:2]), lines


@pytest.mark.parametrize(
    ("bug", "last"),
    [
        ("not reduced", "all outputs and their gradients agree: it goes wrong after backward"),
        (
            "lost part",
            "all outputs agree, the gradient of the last one (the model) differs: look at the loss",
        ),
    ],
)
@pytest.mark.layouts(dp=(1, 2))
def test_the_last_line_says_whether_backward_was_right(layout: Layout, bug: str, last: str) -> None:
    assert report(layout, bug)[-1] == last


OF_TWO_AXES = {
    "not reduced": "equals the reference after a sum over dp and cp: that reduction is missing",
    "divided": "is 1/4 of the reference: divided by dp and cp (4) once too often",
    "mean of means": "is a mean of the means of each dp part and sequence part",
    "lost part": "lacks dp part 0 with sequence part 1",
    "one replica": "is right on rank 0 alone: replicas differ",
    "last microbatch": "lacks microbatches 0, 1 of 3",
    "loss not reduced": "loss equals the reference after a sum over dp and cp: that reduction is missing",
}


@pytest.mark.parametrize("bug", OF_TWO_AXES)
@pytest.mark.layouts(dp=(2,), cp=(2,))
def test_a_bug_over_two_axes_is_named(layout: Layout, bug: str) -> None:
    lines = report(layout, bug)
    assert OF_TWO_AXES[bug] in lines[1], lines


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_of_a_plan_over_two_axes_the_one_that_is_wrong_is_named(layout: Layout) -> None:
    assert "total norm lacks a sum over tp (" in report(layout, "norm of this rank", PlanWithNorm)[1]
    assert "equals the reference after a sum over dp: that" in report(layout, "not reduced")[1]
    assert "each dp part" in report(layout, "mean of means")[1]


class HalfPlan(Plan):
    """A plan over dp and tp with a division by a size that both have."""

    def reduce(self) -> None:
        super().reduce()
        for each in self.model.parameters():
            each.grad /= self.layout["tp"]


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_two_axes_of_one_size_are_both_named(layout: Layout) -> None:
    lines = report(layout, "", HalfPlan)
    assert "(and 9 more of 10) is 1/2 of the reference: divided by dp, or tp (2) once too often" in lines[1]


NORMS = {
    "norm omits": "total norm leaves out `embed.weight` (",
    "norm of this rank": "total norm lacks a sum over tp (",
    "norm counts replicas": "total norm counts what is replicated over tp more than once (",
}


@pytest.mark.parametrize("bug", NORMS)
@pytest.mark.layouts(tp=(1, 2))
def test_a_wrong_norm_is_explained(layout: Layout, bug: str) -> None:
    lines = report(layout, bug, PlanWithNorm)
    assert lines[1].startswith(NORMS[bug]), lines
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        ("no penalty", "lacks the term `penalty` of the loss"),
        ("penalty on each rank", "has the term `penalty` of the loss as 2 times the reference"),
    ],
)
@pytest.mark.layouts(dp=(1, 2))
def test_an_auxiliary_term_that_is_missing_or_doubled_is_named(
    layout: Layout, bug: str, sentence: str
) -> None:
    arguments = (layout, build, plan_with("", PlanWithPenalty), BATCHES, loss_with_penalty)
    assert_same_as_unsharded(*arguments, shards=SHARDS, terms={"penalty": penalty})
    arguments = (layout, build, plan_with(bug, PlanWithPenalty), BATCHES, loss_with_penalty)
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(*arguments, shards=SHARDS, terms={"penalty": penalty})
    assert sentence in str(caught.value).splitlines()[1]


@pytest.mark.layouts(dp=(1, 2))
def test_a_parameter_that_no_optimizer_has_is_named(layout: Layout) -> None:
    lines = report(layout, "", PlanWithStep)
    assert lines[0] == "dp2 is not the unsharded model (after step 0):"
    assert lines[1] == "parameter of `head.bias` did not move in this step: no optimizer has it"
