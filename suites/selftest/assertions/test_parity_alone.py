"""Parity of trainings in one process, which is rank 0 of 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.assertions.parity import (
    Run,
    Trainee,
    Training,
    _first_of_each_kind,
    assert_parity,
    named_gradients,
    named_parameters,
    train,
)
from lockstep.exceptions import Diverged
from lockstep.recorders import ExecutionLog


def model(value: float = 5.0) -> nn.Linear:
    """Return a model of one weight, which is its loss."""
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def weight(of: nn.Module, batch: object) -> torch.Tensor:
    found = of.weight
    assert isinstance(found, torch.Tensor)
    return found[0, 0]


def training(**changes: Any) -> Training:
    given = {
        "batches": lambda step: step,
        "loss": weight,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    }
    return Training(**{**given, **changes})


def numbers(run: Run) -> list[float]:
    return [float(each["loss"]) for each in run.losses]


class Eightfold:
    """A scaler that notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * 8

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("unscale")
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad /= 8

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("step")
        optimizer.step()

    def update(self) -> None:
        self.calls.append("update")


def gradients_of(of: nn.Module) -> Mapping[str, torch.Tensor | None]:
    return named_gradients(of)


def test_a_run_has_the_losses_of_steps_and_the_parameters_around_them() -> None:
    trained: list[nn.Module] = []
    run = train(Trainee(model(), full_gradients=gradients_of, after_step=trained.append), training())
    assert numbers(run) == [5.0, 4.0, 3.0]
    assert not any(each["loss"].requires_grad for each in run.losses)
    assert [float(each["weight"]) for each in (run.start, run.parameters)] == [5.0, 2.0]  # type: ignore[arg-type]
    assert [float(each["weight"]) for each in run.gradients] == [1.0, 1.0, 1.0]  # type: ignore[arg-type]
    assert len(trained) == 3
    assert run.moved
    assert run.losses_of_ranks == [(5.0, 4.0, 3.0)]
    assert run.recording is None
    assert train(Trainee(model()), training()).gradients == []


def test_a_run_has_moved_if_one_parameter_has() -> None:
    start = {"frozen": torch.ones(2), "weight": torch.ones(2), "missing": None}
    assert not Run(start, parameters=dict(start)).moved
    assert Run(start, parameters={**start, "weight": torch.zeros(2)}).moved


def test_a_scaler_scales_the_loss_and_steps_the_optimizer() -> None:
    scaler = Eightfold()
    run = train(Trainee(model(), full_gradients=gradients_of, scaler=scaler), training(steps=2))
    assert scaler.calls == ["unscale", "step", "update"] * 2
    assert [float(each["weight"]) for each in run.gradients] == [1.0, 1.0]  # type: ignore[arg-type]
    assert numbers(run) == [5.0, 4.0]


def test_random_numbers_of_a_step_are_those_of_its_seed() -> None:
    def drawn(**changes: Any) -> list[float]:
        random = training(loss=lambda of, batch: weight(of, batch) + torch.rand(()), **changes)
        return numbers(train(Trainee(model()), random))

    first = drawn()
    assert first == drawn()
    assert first != drawn(seed=1)
    assert len({number % 1 for number in first}) == 3


def test_backward_and_optimizer_are_those_of_the_trainee() -> None:
    def doubled(of: nn.Module, loss: torch.Tensor) -> None:
        (loss * 2).backward()  # type: ignore[no-untyped-call]

    made: list[object] = []

    def optimizer(of: nn.Module, make: Any) -> torch.optim.Optimizer:
        made.append(of)
        return make(of.parameters())

    trainee = Trainee(model(), backward=doubled, optimizer=optimizer)
    assert numbers(train(trainee, training())) == [5.0, 3.0, 1.0]
    assert made == [trainee.model]


def test_trainings_that_are_alike_have_parity() -> None:
    assert_parity(Trainee(model()), Trainee(model()), training())
    assert_parity(train(Trainee(model()), training()), Trainee(model()), training())
    both = [Trainee(model(), full_gradients=gradients_of) for _ in range(2)]
    assert_parity(*both, training())
    with pytest.raises(ValueError, match="where both trainees give full_gradients, or neither"):
        assert_parity(Trainee(model()), both[0], training())
    with pytest.raises(ValueError, match="where both trainees give full_gradients, or neither"):
        assert_parity(both[0], Trainee(model()), training())


def double(of: nn.Module) -> None:
    with torch.no_grad():
        next(of.parameters()).mul_(2)


def test_the_first_difference_of_each_kind_is_said() -> None:
    wrong = Trainee(model(), full_gradients=gradients_of, backward=lambda _, loss: (loss * 2).backward())  # type: ignore[no-untyped-call]
    with pytest.raises(Diverged) as failure:
        assert_parity(Trainee(model(), full_gradients=gradients_of), wrong, training())
    lines = str(failure.value).splitlines()
    starts = ["step 0, gradient weight: ", "step 1, loss: ", "after step 2, parameter weight: ", "and 3 more"]
    assert [line.startswith(f"rank 0: {start}") for line, start in zip(lines, starts, strict=True)] == [
        True
    ] * 4
    assert _first_of_each_kind(["step 0, loss: a", "step 1, loss: b"]) == [
        "step 0, loss: a",
        "and 1 more differences",
    ]


def test_what_would_mean_nothing_is_no_divergence() -> None:
    still = training(loss=lambda of, batch: weight(of, batch) * 0)
    with pytest.raises(
        AssertionError, match="rank 0: no parameter of the reference moved in 3 steps"
    ) as failure:
        assert_parity(Trainee(model()), Trainee(model()), still)
    assert not isinstance(failure.value, Diverged)
    with pytest.raises(AssertionError, match=r"before step 0, parameter weight: ") as failure:
        assert_parity(Trainee(model()), Trainee(model(6.0)), training())
    assert not isinstance(failure.value, Diverged)
    with pytest.raises(Diverged, match="after step 2, parameter weight"):
        assert_parity(Trainee(model()), Trainee(model(), after_step=double), training())


def test_a_recorded_training_has_the_values_of_each_step() -> None:
    scaler = Eightfold()
    with ExecutionLog():
        run = train(Trainee(model(), full_gradients=gradients_of, scaler=scaler), training(steps=2))
    assert run.recording is not None
    assert run.recording.scales == {0: 8.0, 1: 8.0}
    kinds = ("loss", "reduced gradient", "parameter after the step")
    events = [event for event in run.recording.events if event.kind in kinds]
    assert [(event.step, event.kind) for event in events] == [
        (step, kind) for step in (0, 1) for kind in kinds
    ]
    assert [float(event.value) for event in events if event.value is not None] == [5, 1, 4, 4, 1, 3]
    with ExecutionLog():
        plain = train(Trainee(model()), training(steps=1)).recording
    assert plain is not None
    assert plain.scales == {0: 1.0}


def test_where_two_recorded_trainings_part_is_said() -> None:
    with ExecutionLog(), pytest.raises(Diverged) as failure:
        assert_parity(Trainee(model()), Trainee(model(), after_step=double), training())
    lines = str(failure.value).splitlines()
    assert lines[0].startswith(
        "first divergence on rank 0: step 0, optimizer step: parameter `weight` after the"
    )
    assert lines[-1].startswith("rank 0: step 1, loss: ")
    reference = train(Trainee(model()), training())
    with ExecutionLog(), pytest.raises(Diverged) as failure:
        assert_parity(reference, Trainee(model(), after_step=double), training())
    assert str(failure.value).startswith("rank 0: step 1, loss: ")


def test_parameters_and_gradients_have_their_names() -> None:
    of = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert list(named_parameters(of)) == ["0.weight", "0.bias"]
    assert named_gradients(of) == {"0.weight": None, "0.bias": None}
    of(torch.ones(1, 1)).sum().backward()
    found = named_gradients(of)
    assert found["0.bias"] is of[0].bias.grad
