"""Plans in their real dtype, after float64 held, against the tolerance that the unsharded model gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.layouts import Layout, assert_same_as_unsharded, witness_batches
from lockstep.layouts.moment import Held, Moment
from lockstep.layouts.reference import Batches, Reference, Task, reference_of, train
from lockstep.layouts.rounding import FACTOR, _perturbed, excess, in_dtype, model_in_dtype, tolerances
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


def build_two() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)).double()


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - 1).square().mean()


REFERENCE = Reference(
    Task(
        build_two,
        squares,
        lambda parameters: torch.optim.SGD(parameters, 0.01),
        Batches([{"x": torch.arange(6.0, dtype=torch.float64).view(2, 3) / (3 + step)} for step in range(2)]),
    )
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


def test_a_tolerance_is_eight_times_the_largest_of_three_errors() -> None:
    found = tolerances(REFERENCE, torch.float32)
    assert len(found) == len(REFERENCE.steps)
    assert tolerances(REFERENCE, torch.float32) is found
    eps = torch.finfo(torch.float32).eps
    task, batches = REFERENCE.task, REFERENCE.task.batches.of_steps
    runs = [
        train(
            task,
            model_in_dtype(build_two(), torch.float32),
            [in_dtype(each, torch.float32) for each in batches],
        )
    ]
    runs += [train(task, _perturbed(build_two(), eps, seed), batches) for seed in range(3)]
    for number, (right, bound) in enumerate(zip(REFERENCE.steps, found, strict=True)):
        others = [run[number] for run in runs]
        for kind in ("before", "gradients", "after"):
            for name, whole in getattr(right, kind).items():
                off = [float((getattr(each, kind)[name] - whole).abs().max()) for each in others]
                expected = 8 * max(*off, eps * float(whole.abs().max()))
                assert float(getattr(bound, kind)[name]) == pytest.approx(expected)
        for kind in ("loss", "norm"):
            whole = getattr(right, kind)
            off = [abs(getattr(each, kind) - whole) for each in others]
            assert getattr(bound, kind) == pytest.approx(8 * max(*off, eps * abs(whole)), rel=1e-3)


def test_what_perturbed_parameters_move_counts() -> None:
    """The gradient of (w - 1 + 2^-20)^2 at w = 1 is exact in float32, and moves by twice what w does."""

    def build_ones() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        return model

    def near(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model.weight - 1 + batch).square().sum()

    batches = Batches([torch.tensor(2.0**-20, dtype=torch.float64)] * 2)
    task = Task(build_ones, near, lambda parameters: torch.optim.SGD(parameters, 0.25), batches)
    bound = float(tolerances(Reference(task), torch.float32)[0].gradients["weight"])
    moved = [(_perturbed(build_ones(), 2.0**-23, seed).weight.detach() - 1).abs().max() for seed in range(3)]
    assert bound == pytest.approx(8 * 2 * float(max(moved)), rel=1e-6)


def test_only_floating_point_is_cast() -> None:
    half = torch.float16
    batch = in_dtype({"x": torch.ones(2), "n": {"i": torch.arange(2), "y": torch.ones(1)}, "word": "a"}, half)
    assert (batch["x"].dtype, batch["n"]["i"].dtype, batch["n"]["y"].dtype) == (half, torch.int64, half)
    assert batch["word"] == "a"
    assert in_dtype(torch.ones(2), half).dtype == half
    assert in_dtype(torch.arange(2), half).dtype == torch.int64
    model = nn.BatchNorm1d(2)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    assert model_in_dtype(model, half) is model
    assert model.weight.dtype == model.running_mean.dtype == half
    assert (model.num_batches_tracked.dtype, model.turns.dtype) == (torch.int64, torch.complex64)


def test_parameters_are_perturbed_by_less_than_eps() -> None:
    first, again, other = (_perturbed(build_two(), 0.5, seed) for seed in (0, 0, 1))
    ratios = torch.cat(
        [
            (a / b).detach().flatten() - 1
            for a, b in zip(first.parameters(), build_two().parameters(), strict=True)
        ]
    )
    assert 0.2 < float(ratios.max()) <= 0.5
    assert -0.5 <= float(ratios.min()) < -0.2
    first_number = float(torch.rand(1, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert float(ratios[0]) == pytest.approx(0.5 * (2 * first_number - 1))
    assert first[0].weight.equal(again[0].weight)
    assert not first[0].weight.equal(other[0].weight)


def moment(step: int, off: dict[str, float], loss: float | None = None, norm: float | None = None) -> Moment:
    """Return the gradients of a step, of which some are off by so many tolerances."""
    right, allowed = REFERENCE.steps[step], tolerances(REFERENCE, torch.float32)[step]
    held = []
    for name, whole in right.gradients.items():
        value = whole.clone()
        value.view(-1)[0] += off.get(name, 0) * allowed.gradients[name]
        held.append(Held(name, name, torch.arange(whole.numel()).view(whole.shape), value))
    held.append(Held("0.bias", "0.bias", torch.zeros(0, dtype=torch.int64), torch.zeros(0)))
    held.append(Held("0.bias", "0.bias", torch.zeros(1, dtype=torch.int64), None))
    numbers = (
        None if times is None else value + times * bound
        for times, value, bound in ((loss, right.loss, allowed.loss), (norm, right.norm, allowed.norm))
    )
    return Moment(step, f"step {step}", "gradient", held, *numbers)


def test_the_first_moment_and_the_worst_value_are_named() -> None:
    dtype = torch.float32
    right = moment(0, {"0.weight": 0.9}, -0.9, 0.9)
    assert excess([], REFERENCE, dtype) == (0, 0.0, "")
    assert excess([right, Moment(1, "step 1", "gradient")], REFERENCE, dtype) == (2, 0.0, "")
    place, ratio, text = excess([right, moment(1, {"1.weight": 3, "0.bias": -5}, 2.0, 2.0)], REFERENCE, dtype)
    assert (place, ratio) == (1, pytest.approx(5))
    bound = float(tolerances(REFERENCE, dtype)[1].gradients["0.bias"])
    assert text == (
        f"gradient of `0.bias` is off by {5 * bound:.3g} in float32, "
        f"where rounding explains {bound:.3g} (step 1)"
    )
    for numbers, what in (((1.5, 0.0), "loss"), ((None, -1.5), "total norm")):
        place, ratio, text = excess([moment(1, {}, *numbers), right], REFERENCE, dtype)
        assert (place, ratio) == (0, pytest.approx(1.5, rel=1e-3))
        assert text.startswith(f"{what} is off by ")
        assert text.endswith(" (step 1)")
    place, ratio, text = excess([moment(0, {"0.bias": math.nan})], REFERENCE, dtype)
    assert (place, ratio) == (0, math.inf)
    assert text.startswith("gradient of `0.bias` is off by nan in float32")
    complaint = moment(0, {"0.bias": 3})
    complaint.complaints += ["first", "second"]
    assert excess([right, complaint], REFERENCE, dtype) == (1, math.inf, "first")
