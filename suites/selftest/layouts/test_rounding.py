"""Plans in their real dtype, after float64 held, against the tolerance that the unsharded model gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.layouts import Layout, assert_same_as_unsharded, witness_batches
from lockstep.layouts.reference import Batches, Task, reference_of
from lockstep.layouts.rounding import FACTOR, tolerances
from suites.selftest.layouts.model import SHARDS, VOCAB, PlanWithNorm, build, loss

BATCHES = witness_batches(VOCAB)
DTYPES = [torch.float32, torch.bfloat16]


class InDtype(PlanWithNorm):
    """A plan that keeps the dtype of the model given, with a bug in any but float64."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        super().__init__(model, layout)
        self.dtype, self.real_bug = next(model.parameters()).dtype, bug
        if bug != "in float64":
            self.model.to(self.dtype)

    def reduce(self) -> None:
        super().reduce()
        if self.real_bug == "factor" and self.dtype != torch.float64:
            self.model.up.weight.grad *= 1.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.layouts(dp=(1, 2), tp=(1, 2), at_most=2)
def test_a_right_plan_holds_in_its_dtype(layout: Layout, dtype: torch.dtype) -> None:
    assert_same_as_unsharded(layout, build, InDtype, BATCHES, loss, shards=SHARDS, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.layouts(tp=(1, 2))
def test_a_bug_of_one_dtype_is_found(layout: Layout, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(
            *(layout, build, lambda model, layout: InDtype(model, layout, "factor"), BATCHES, loss),
            shards=SHARDS,
            dtype=dtype,
        )
    name = str(dtype).removeprefix("torch.")
    title, line = str(caught.value).splitlines()
    assert title == f"tp2 holds in float64, and is not the unsharded model in {name}:"
    assert line.startswith("  gradient of `up.weight` is off by 0.0")
    assert f" in {name}, where rounding explains " in line
    assert line.endswith("(step 0)")


@pytest.mark.layouts(tp=(1, 2))
def test_a_plan_that_stays_in_float64_is_refused(layout: Layout) -> None:
    with pytest.raises(
        AssertionError, match="no parameter is float32: the plan, or a constructor that it calls, changes"
    ):
        assert_same_as_unsharded(
            *(layout, build, lambda model, layout: InDtype(model, layout, "in float64"), BATCHES, loss),
            shards=SHARDS,
            dtype=torch.float32,
        )


def test_tolerances_follow_the_eps_of_the_dtype() -> None:
    reference = reference_of(
        Task(build, loss, lambda parameters: torch.optim.SGD(parameters, 0.01), Batches(BATCHES))
    )
    largest = reference.steps[0].gradients["up.weight"].abs().max()
    in_32, in_16 = (
        float(tolerances(reference, dtype)[0].gradients["up.weight"] / largest) for dtype in DTYPES
    )
    assert FACTOR * 2**-23 <= in_32 < 1e-4
    assert FACTOR * 2**-7 <= in_16 < 1
