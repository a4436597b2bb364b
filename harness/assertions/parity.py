"""Parity of a sharded run, and of shards, with a reference. Inside a rank; calls torch.distributed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import divergence
from lockstep.assertions.agreement import fail_together, gathered
from lockstep.assertions.closeness import EXACT, Named, Tolerance, differences
from lockstep.assertions.full_tensors import full_tensors
from lockstep.backends.device import accelerator
from lockstep.exceptions import Diverged
from lockstep.recorders import active_log
from lockstep.recorders.tensors import is_dtensor, local_part
from lockstep.recorders.torch_internals import COMPILED

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Batch = TypeVar("Batch")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Scaler(Protocol):
    """The methods of `torch.amp.GradScaler` that a training step calls."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer) -> Any: ...
    def update(self) -> None: ...


def per_rank_batches(
    make: Callable[[torch.Generator], Batch], seed: int, rank: int
) -> Callable[[int], Batch]:
    """Return a function from step to batch, different for each (seed, rank, step) and the same at each call.

    Args:
        make: builds a batch from a CPU generator, e.g. `lambda g: torch.randn(4, 8, generator=g)`.
    """

    def batch(step: int) -> Batch:
        return make(torch.Generator().manual_seed(_seed(seed, rank, step)))

    return batch


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of an unsharded, DDP or DTensor model unsharded, without DDP's prefix.

    With DTensor parameters it is a collective, and they come without autograd's history.
    """
    return full_tensors(dict(_without_ddp(model).named_parameters()))


def named_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients as `named_parameters` returns the parameters; None where there is none."""
    return full_tensors({name: p.grad for name, p in _without_ddp(model).named_parameters()})


def sgd_with_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with lr 0.01 and momentum 0.9: unlike Adam it notices a gradient that is off by a factor."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def plain_optimizer(model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
    """Return the optimizer that `make` gives of the model's parameters."""
    return make(model.parameters())


def plain_backward(model: nn.Module, loss: torch.Tensor) -> None:
    """Run backward of the loss."""
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Trainee:
    """A model to train, and functions that return its unsharded parameters and gradients.

    Attributes:
        model: model, as it is called.
        full_parameters: the model's unsharded parameters by the names of the unwrapped model, the same on
            every rank; called on every rank. The method of an engine's adapter.
        full_gradients: unsharded gradients, where they are to be compared after each backward as well.
        backward: runs backward of the (scaled) loss.
        scaler: a gradient scaler, or None.
        after_step: called with the model after each step, e.g. for a round trip through its state_dict.
        optimizer: makes what steps the model, from the model and `Training.optimizer`.
    """

    model: nn.Module
    full_parameters: Callable[[nn.Module], Mapping[str, torch.Tensor]] = named_parameters
    full_gradients: Callable[[nn.Module], Named] | None = None
    backward: Callable[[nn.Module, torch.Tensor], object] = plain_backward
    scaler: Scaler | None = None
    after_step: Callable[[nn.Module], object] | None = None
    optimizer: Callable[[nn.Module, MakeOptimizer], torch.optim.Optimizer] = plain_optimizer


@dataclass(frozen=True)
class Training:
    """The training that reference and candidate both run.

    Attributes:
        batches: this rank's batch for a step, the same at each call: see `per_rank_batches`.
        loss: the local loss of a batch, a tensor of one element: forward included.
        steps: optimizer steps.
        optimizer: makes the optimizer from the model's parameters.
        tolerance: a tolerance, or the lowest dtype of the arithmetic, for its row of `TOLERANCES`; None
            takes the row of each tensor's own dtype.
        same_dtype: whether losses, parameters and gradients must agree in dtype as well.
        same_data: whether ranks train on the same batches. With the same data everywhere a reduction that
            does nothing looks like a mean, so it must be stated.
        seed: before each forward generators are seeded from (seed, rank, step): equal dropout in both runs.
    """

    batches: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    steps: int = 3
    optimizer: MakeOptimizer = sgd_with_momentum
    tolerance: Tolerance | torch.dtype | None = None
    same_dtype: bool = True
    same_data: bool = False
    seed: int = 0


@dataclass
class Run:
    """Results of one training: parameters before and after it, losses and gradients by step.

    Attributes:
        recording: all that it computed, where this run of the test is recorded.
    """

    start: Named
    losses: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)
    recording: divergence.Recording | None = None

    @cached_property
    def moved(self) -> bool:
        """True if any parameter changed."""
        return any(
            differences({name: value}, {name: self.start.get(name)}, EXACT)
            for name, value in self.parameters.items()
            if value is not None
        )

    @cached_property
    def losses_of_ranks(self) -> list[tuple[float, ...]]:
        """The losses of each rank, in order. The first use is a collective."""
        return list(gathered(tuple(float(step["loss"]) for step in self.losses)).values())


def assert_parity(reference: Trainee | Run, candidate: Trainee, training: Training) -> None:
    """Assert that the candidate learns what the reference learns. Every rank must call it.

    Both start from the same weights, which is checked, and train on this rank's batches, the reference first.
    It compares the loss of each step, the gradients of each step if both trainees have `full_gradients`, and
    the unsharded parameters at the end. While they train, only the models' own collectives run.

    A reference that many candidates are held to is trained once: pass the result of `train` with the same
    training on the same ranks.

    Raises:
        Diverged: an AssertionError on every rank: rank, step, the loss or the name of the parameter or
            gradient, the largest absolute and relative difference and where. The test then runs again with
            recording, and the message names the place where the two parted first.
        AssertionError: it would be empty: no step, no parameters, none that moved, or the same losses on all
            ranks without `same_data`; or the two start from different weights.
        ValueError: one of the two alone has `full_gradients`.
    """
    __tracebackhide__ = True
    if training.steps < 1:
        raise AssertionError("no step: nothing to compare")
    expected = train(reference, training) if isinstance(reference, Trainee) else reference
    if bool(expected.gradients) != bool(candidate.full_gradients):
        raise ValueError("gradients are compared where both trainees give full_gradients, or neither")
    start = _full("", candidate.full_parameters, candidate.model)
    fail_together(_compare(training, "before step 0, parameter ", start, expected.start))
    actual = _train(candidate, training, start)
    found = _differences(actual, expected, training)
    try:
        fail_together([*_first_of_each_kind(found), *_emptiness(expected, training)])
    except AssertionError as error:
        if not any(gathered(bool(found)).values()):
            raise
        raise _diverged(str(error), expected, actual, training) from None


def _diverged(message: str, expected: Run, actual: Run, training: Training) -> Diverged:
    """Return the error; where both runs are recorded it shows where they parted. A collective then."""
    log = active_log()
    if log is None or expected.recording is None or actual.recording is None:
        return Diverged(message)
    with log.paused():
        parting = divergence.first_parting(expected.recording, actual.recording, training.tolerance)
        by_rank = gathered(parting)
        raced = gathered(divergence.races(actual.recording.events))
    return Diverged(f"{divergence.describe(by_rank, raced)}\n{divergence.shortened(message)}")


def train(trainee: Trainee, training: Training) -> Run:
    """Train, and return the run that `assert_parity` compares. Every rank must call it."""
    return _train(trainee, training, _full("", trainee.full_parameters, trainee.model))


def _train(trainee: Trainee, training: Training, start: Named) -> Run:
    model, scaler, run = trainee.model, trainee.scaler, Run(start)
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = accelerator()
    log = active_log()
    recorder = None if log is None else divergence.TrainingRecorder(log, model, start)
    optimizer = trainee.optimizer(model, training.optimizer)
    for step in range(training.steps):
        if recorder:
            recorder.begin_step(step, scaler.scale(torch.ones(())) if scaler else None)
        optimizer.zero_grad()
        seed = _seed(training.seed, rank, step)
        # `torch.manual_seed` would also queue a seed for every kind of device that was never used.
        torch.default_generator.manual_seed(seed)
        if device is not None and device.is_used():
            device.seed(seed)
        loss = training.loss(model, training.batches(step))
        run.losses.append({"loss": loss.detach().clone()})
        if recorder:
            recorder.log.record("loss", run.losses[-1])
        trainee.backward(model, scaler.scale(loss) if scaler else loss)
        if scaler:
            scaler.unscale_(optimizer)
        if trainee.full_gradients:
            run.gradients.append(_full("reduced gradient", trainee.full_gradients, model))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if trainee.after_step:
            trainee.after_step(model)
        if recorder:
            recorder.log.step = step  # the optimizer has counted it
            _full("parameter after the step", trainee.full_parameters, model)
    run.parameters = _full("", trainee.full_parameters, model)
    run.recording = None if recorder is None else recorder.recording()
    return run


def _full(kind: str, read: Callable[[nn.Module], Named], model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of unsharded tensors; a log has these under `kind`, and not how they were made."""
    if (log := active_log()) is None:
        return _snapshot(read(model))
    with log.paused():
        values = _snapshot(read(model))
    if kind:
        log.record(kind, values)
    return values


def _differences(actual: Run, expected: Run, training: Training) -> list[str]:
    found: list[str] = []
    for step in range(training.steps):
        found += _compare(training, f"step {step}, ", actual.losses[step], expected.losses[step])
        if expected.gradients:
            where = f"step {step}, gradient "
            found += _compare(training, where, actual.gradients[step], expected.gradients[step])
    where = f"after step {training.steps - 1}, parameter "
    return found + _compare(training, where, actual.parameters, expected.parameters)


def _first_of_each_kind(found: Sequence[str]) -> list[str]:
    """Return the first difference in a loss, a gradient and a parameter, and how many more there are."""
    kinds = {
        re.sub(r"\d+", "", finding.partition(":")[0]).split()[-2:][0]: finding for finding in found[::-1]
    }
    shown = [finding for finding in found if finding in kinds.values()]
    more = len(found) - len(shown)
    return [*shown, *([f"and {more} more differences"] if more else [])]


def _compare(training: Training, where: str, actual: Named, expected: Named) -> list[str]:
    """Return a line for each difference, beginning with `where`."""
    lines = differences(actual, expected, training.tolerance, same_dtype=training.same_dtype)
    return [where + line for line in lines]


def _emptiness(reference: Run, training: Training) -> list[str]:
    """Return reasons why agreement of this run would mean nothing."""
    found: list[str] = []
    if not reference.moved:
        found.append(f"no parameter of the reference moved in {training.steps} steps")
    losses = reference.losses_of_ranks
    if not training.same_data and len(losses) > 1 and len(set(losses)) == 1:
        found.append("the losses are the same on all ranks: give them different data, or pass same_data=True")
    return found


def assert_sharded_parity(
    sharded: nn.Module, reference: nn.Module, tolerance: Tolerance | torch.dtype | None = None
) -> None:
    """Assert that each DTensor parameter and its gradient hold this rank's shard of the reference's.

    Every rank must call it. Values, dtypes, names, and the placements of the gradients are compared.

    Args:
        sharded: model with DTensors as parameters, named as in the reference.
        reference: unsharded; the same on every rank.
        tolerance: tolerance, as in `assert_named_close`.

    Raises:
        AssertionError: on every rank, with rank, name and largest difference; also if there is no parameter.
    """
    __tracebackhide__ = True
    full = dict(reference.named_parameters())
    actual: dict[str, torch.Tensor | None] = {}
    expected: dict[str, torch.Tensor | None] = {}
    found: list[str] = []
    for name, p in sharded.named_parameters():
        if not is_dtensor(p) or name not in full:
            found.append(f"{name}: not a DTensor, or not a parameter of the reference")
            continue
        actual |= {name: local_part(p), f"{name}.grad": local_part(p.grad)}
        whole = full.pop(name)
        expected |= {name: _part(whole, of=p), f"{name}.grad": _part(whole.grad, of=p)}
        if is_dtensor(p.grad) and p.grad.placements != p.placements:
            found.append(f"{name}.grad: placed {p.grad.placements}, its parameter {p.placements}")
    found += [f"{name}: missing" for name in full]
    fail_together([*found, *differences(actual, expected, tolerance)])


def _part(whole: torch.Tensor | None, of: DTensor) -> torch.Tensor | None:
    if whole is None:
        return None
    from torch.distributed.tensor import distribute_tensor  # is imported: there is a DTensor

    # Without a source rank each rank shards its own copy: no collective.
    return distribute_tensor(whole.detach(), of.device_mesh, of.placements, src_data_rank=None).to_local()


def _without_ddp(model: nn.Module) -> nn.Module:
    model = getattr(model, COMPILED.rstrip("."), model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def _snapshot(tensors: Named) -> dict[str, torch.Tensor | None]:
    """Return copies by the names that tensors have in the model that was not compiled."""
    return {
        name.replace(COMPILED, ""): None if tensor is None else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def _seed(*parts: int) -> int:
    """Return a seed below 2^63 that no two short sequences of numbers share in practice, on any machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
