"""The comparison of a sharded run with the unsharded one. Inside a rank; calls torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions.agreement import gathered, largest
from lockstep.assertions.parity import MakeOptimizer, sgd_with_momentum
from lockstep.layouts.batches import Batch, KeepPart, part_of, refuse
from lockstep.layouts.diagnosis import Failure, describe
from lockstep.layouts.layout import COPIES, DATA_AXES, Layout
from lockstep.layouts.moment import Held, Moment, is_wrong
from lockstep.layouts.parting import Trace
from lockstep.layouts.reference import (
    Batches,
    Loss,
    Reference,
    Task,
    Tensors,
    is_narrow,
    of_parts,
    reference_of,
    takes_parts,
)
from lockstep.layouts.rounding import excess, in_dtype, model_in_dtype
from lockstep.layouts.shards import ShardMap, region_of
from lockstep.recorders import CollectivesLog
from lockstep.recorders.tensors import local_part, short

__tracebackhide__ = True

_NEVER = 2**31


class Trainer(Protocol):
    """A sharded model, and its forward and backward.

    It may also have `grad_norm()`, which returns the total norm of the gradients, and `step()`, which takes
    the place of the optimizer.
    """

    model: nn.Module

    def __call__(self, batch: Batch, microbatches: int) -> torch.Tensor | None:
        """Run forward and backward of the whole batch, of which this rank takes its part.

        Returns:
            The loss of the whole batch; None on ranks that do not know it, as in a pipeline's first stage.
        """


@dataclass(frozen=True)
class PlainTrainer:
    """The trainer of a bare module: its loss is the mean over the parts of ranks and microbatches."""

    model: nn.Module
    loss: Loss
    layout: Layout

    def __call__(self, batch: Batch, microbatches: int) -> torch.Tensor:
        axes = [axis for axis in DATA_AXES if self.layout.sizes.get(axis, 1) > 1]
        mine, total = part_of(batch, *self.layout.part(axes)), torch.zeros((), dtype=torch.float64)
        for index in range(microbatches):
            loss = of_parts(self.loss, self.model, part_of(mine, index, microbatches)) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + local_part(loss.detach())
        if axes:
            dist.all_reduce(total, group=self.layout.group(*axes))
        return total / self.layout.part(axes)[1]


def assert_same_as_unsharded(
    layout: Layout,
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, Layout], Any],
    batches: Sequence[Batch],
    loss: Loss,
    *,
    shards: ShardMap | None = None,
    microbatches: Sequence[int] = (1, 3, 1),
    optimizer: MakeOptimizer = sgd_with_momentum,
    parts: KeepPart | None = None,
    terms: Mapping[str, Loss] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[str]:
    """Assert that a sharded model trains as the unsharded one does, in float64. Every rank must call it.

    Compared are the loss, every gradient and the total norm of each step, and every parameter before and
    after it, each within 1e-12 of the largest value of the unsharded tensor. Each rank compares its own.

    Args:
        layout: the fixture `layout`.
        build: returns the unsharded model in float64, the same at each call.
        parallelize: returns the `Trainer` of the model, which it may change, on this rank; or a bare module,
            for which `loss` is called with this rank's rows, and the mean over ranks taken.
        batches: the whole batch of each step.
        loss: the loss of the model on a batch. One that is no sum over parts of it, as with an auxiliary loss
            by rank or batch norm, has a third parameter `parts`: a tuple of the microbatches of all ranks,
            those of one rank together, of which it returns what the plan computes.
        shards: the cuts of plain parameters.
        microbatches: how many the trainer runs in each step.
        optimizer: makes that of both models from their parameters.
        parts: keeps a sequence part of a batch, as `keep_labels` does: for diagnoses of axis cp.
        terms: parts of the loss that are functions of the whole batch alone, such as auxiliary ones, by name;
            they may have a parameter `parts`, too.
        dtype: in which the plan runs once more when it holds in float64, against a tolerance that is
            estimated from the unsharded model: see `lockstep.layouts.rounding`.

    Returns:
        Notes, such as that a gradient was Partial and had to be reduced.

    Raises:
        AssertionError: on every rank, with the same report: the tensors that differ, and the one reduction,
            factor or part that explains them, where there is one.
        ValueError: with these inputs a wrong plan could pass.
    """
    shards = shards or ShardMap()
    if not isinstance(shards, ShardMap):
        raise TypeError(f"shards is {type(shards).__name__}: give a ShardMap(...) of it")
    data = math.prod(layout.sizes.get(axis, 1) for axis in DATA_AXES)
    refuse(batches, microbatches, data)
    named = tuple((terms or {}).items())
    cuts = tuple((data, each) for each in microbatches) if takes_parts(loss) else ()
    reference = reference_of(Task(build, loss, optimizer, Batches(batches), parts, named, cuts))
    _refuse_rules(shards, reference)
    reference.refuse_dead_parts(data, layout["cp"] if parts is not None else 1)
    reference.refuse_dead_experts(shards)
    model = build()
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, reference.start[name]):
            raise ValueError(f"build() gives `{name}` other values at its second call: seed it")
    del model

    def train(
        batches: Sequence[Batch], trace: Trace | None = None, dtype: torch.dtype = torch.float64
    ) -> _ShardedRun:
        trainer = trainer_of(parallelize(model_in_dtype(build(), dtype), layout), loss, layout)
        run = _ShardedRun(trainer, reference, shards, layout, dtype)
        run.train(batches, microbatches, optimizer, trace)
        return run

    layout.asked.clear()
    run = train(batches)
    if (wrong := run.first_wrong()) is not None:
        traced = None
        if wrong.kind == "gradient":  # a failure has time to train once more
            with suppress(Exception):  # the report says what was wrong in the first run
                train(batches[: wrong.step + 1], trace := Trace())
                traced = trace.joined()
        run.fail(wrong, microbatches[wrong.step], traced)
    if run.unused:
        with CollectivesLog() as log:  # a plan may have groups of its own
            train(batches)
        _refuse_unused(run.unused, layout, log)
    if dtype != torch.float64:
        train([in_dtype(each, dtype) for each in batches], dtype=dtype).assert_close()
    return run.notes


def _refuse_unused(axes: Sequence[str], layout: Layout, log: CollectivesLog) -> None:
    """Refuse an axis along which all ranks do the same: the layout says no more than one without it.

    Raises:
        ValueError: on every rank, as no rank has sent anything along one.
    """
    sent = {axis for key in layout.by_axes(log) for axis in key.split("-")}
    used = largest(torch.tensor([axis in sent for axis in axes], dtype=torch.int64), None).tolist()
    for axis in (axis for axis, is_used in zip(axes, used, strict=True) if not is_used):
        raise ValueError(
            f"the axis `{axis}` of {layout.name}: the plan does not ask for it, and sends nothing along it; "
            "is it misspelt?"
        )


def _refuse_rules(shards: ShardMap, reference: Reference) -> None:
    for pattern in shards.rules:
        if not any(fnmatchcase(name, pattern) for name in (*reference.names, *reference.tied)):
            raise ValueError(
                f"the shard map's entry {pattern!r} matches no parameter: {', '.join(reference.names)}"
            )


def trainer_of(given: Any, loss: Loss, layout: Layout) -> Any:
    """Return the trainer that `parallelize` gives, or that of a bare module.

    Raises:
        TypeError: it is neither.
    """
    trainer = PlainTrainer(given, loss, layout) if isinstance(given, nn.Module) else given
    if not callable(trainer) or not isinstance(getattr(trainer, "model", None), nn.Module):
        raise TypeError(
            f"parallelize() returns {type(trainer).__name__}: return a module, or a trainer with a module "
            "`model` that is called with a batch and a number of microbatches"
        )
    return trainer


@dataclass
class _ShardedRun:
    """The run of a trainer on this rank, and what it holds at each moment."""

    trainer: Any
    reference: Reference
    shards: ShardMap
    layout: Layout
    dtype: torch.dtype = torch.float64
    moments: list[Moment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Axes larger than 1 that the plan has asked for on no rank."""
    _regions: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def train(
        self,
        batches: Sequence[Batch],
        microbatches: Sequence[int],
        make: MakeOptimizer,
        trace: Trace | None = None,
    ) -> None:
        """Train, and note each moment; end with the backward of the last batch if that is to be traced."""
        trainer, model = self.trainer, self.trainer.model
        start = self._moment(0, "before step 0", "parameter", self._parameters())
        self._complain_of_dtypes(start)
        step_alone = getattr(trainer, "step", None)
        # A stage may have no parameters.
        optimizer = None if step_alone or not list(model.parameters()) else make(model.parameters())
        for step, (batch, micro) in enumerate(zip(batches, microbatches, strict=False)):
            if optimizer is not None:
                optimizer.zero_grad()
            if trace is not None and step == len(batches) - 1:
                with trace.record(model, self._name_of_module):
                    trainer(batch, micro)
                return
            loss = trainer(batch, micro)
            norm = trainer.grad_norm() if hasattr(trainer, "grad_norm") else None
            moment = self._moment(step, f"step {step}", "gradient", self._gradients())
            moment.loss, moment.norm = self._number(loss, "loss", moment), self._number(norm, "norm", moment)
            if step_alone is not None:
                step_alone()
            elif optimizer is not None:
                optimizer.step()
            self._moment(step, f"after step {step}", "parameter", self._parameters())

    def first_wrong(self) -> Moment | None:
        """Agree with the other ranks, by one small collective, on the first moment at which one is wrong.

        Raises:
            AssertionError: no rank has a parameter, or the loss.
        """
        wrong = (place for place, moment in enumerate(self.moments) if self._is_wrong(moment))
        first = next(wrong, _NEVER)
        has_loss = any(moment.loss is not None or moment.complaints for moment in self.moments)
        names, axes = self.reference.names, [axis for axis in self.layout.large if axis != COPIES]
        mine = [*(name in self._names for name in names), *(axis in self.layout.asked for axis in axes)]
        agreed = largest(torch.tensor([-first, has_loss, *mine], dtype=torch.int64), None).tolist()
        missing = [name for name, has in zip(names, agreed[2:], strict=False) if not has]
        self.unused = [axis for axis, has in zip(axes, agreed[2 + len(names) :], strict=True) if not has]
        title = f"{self.layout.name} is not the unsharded model"
        if missing:
            listed = ", ".join(f"`{name}`" for name in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise AssertionError(f"{title}: no rank has {listed}{more}")
        if not agreed[1]:
            raise AssertionError(f"{title}: the trainer returns the loss on no rank")
        return None if -agreed[0] == _NEVER else self.moments[-agreed[0]]

    def assert_close(self) -> None:
        """Fail on every rank where a value is off by more than its dtype explains; float64 held."""
        found = gathered(excess(self.moments, self.reference, self.dtype)).values()
        first = min(found, key=lambda each: (each[0], -each[1]))
        if first[2]:
            title = f"{self.layout.name} holds in float64, and is not the unsharded model in"
            raise AssertionError(f"{title} {short(self.dtype)}:\n  {first[2]}")

    def fail(self, wrong: Moment, microbatches: int, traced: tuple[Tensors, Tensors] | None) -> None:
        """Raise the report on a moment, the same on every rank."""
        moments, text = gathered(wrong), None
        traces = gathered(traced)
        if self.layout.rank == 0:
            failure = Failure(self.layout, self.shards, self.reference, microbatches, moments, traces)
            text = describe(failure, self.notes)
        raise AssertionError(gathered(text)[0])

    def _name_of_module(self, own: str) -> str:
        """Return the unsharded model's name for one of this rank's modules."""
        if not own:
            return own if self.layout["pp"] == 1 else "a stage"
        with suppress(Exception):  # it is a function of parameters' names
            return self.shards.name(f"{own}.weight", self.layout).removesuffix(".weight")
        return f"{own} of a stage"

    def _is_wrong(self, moment: Moment) -> bool:
        expected = self.reference.steps[moment.step]
        return bool(
            moment.complaints
            or (moment.loss is not None and is_wrong(moment.loss, expected.loss))
            or (moment.norm is not None and is_wrong(moment.norm, expected.norm))
            or any(each.error(whole) for each, whole in moment.with_expected(self.reference))
        )

    def _moment(
        self, step: int, title: str, kind: str, tensors: Iterator[tuple[str, str, Any, Any]]
    ) -> Moment:
        """Note the tensors of this moment, and complain of those that cannot be compared."""
        moment = Moment(step, title, kind)
        self.moments.append(moment)
        wholes = moment.whole(self.reference)
        for given, own, parameter, value in tensors:
            name = self.reference.tied.get(given, given)
            if name not in self.reference.names:
                by = "" if name == own else f" (`{name}` by the shard map)"
                moment.complaints.append(f"`{own}`{by} is no parameter of the unsharded model: rename it")
                continue
            self._names.add(name)
            if name not in wholes:
                continue  # a frozen one has no gradient
            region = self._region(given, parameter if value is None else value, wholes[name].shape, own)
            held = Held(
                name, own, region, None if value is None else local_part(value).detach().cpu().clone()
            )
            if complaint := held.complaint(wholes[name], kind):
                moment.complaints.append(complaint)
            else:
                moment.held.append(held)
        return moment

    def _region(self, name: str, tensor: torch.Tensor, shape: Sequence[int], own: str) -> torch.Tensor:
        placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if (key := (name, own, placed)) not in self._regions:
            self._regions[key] = region_of(name, tensor, shape, self.shards, self.layout)
        return self._regions[key]

    def _own(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield the parameters of this rank: the unsharded model's name, this rank's, and itself."""
        model = self.trainer.model
        model = model.module if isinstance(model, DistributedDataParallel) else model
        for own, parameter in model.named_parameters():
            yield self.shards.name(own, self.layout), own, parameter

    def _parameters(self) -> Iterator[tuple[str, str, Any, Any]]:
        return ((name, own, parameter, parameter) for name, own, parameter in self._own())

    def _gradients(self) -> Iterator[tuple[str, str, Any, Any]]:
        given = None if self.shards.gradients is None else self.shards.gradients(self.trainer.model)
        for name, own, parameter in self._own():
            gradient = parameter.grad if given is None else given.get(own)
            if isinstance(gradient, DTensor) and any(
                isinstance(each, Partial) for each in gradient.placements
            ):
                note = f"gradient of `{name}` is {gradient.placements}: reduced here, as it declares"
                if note not in self.notes:
                    self.notes.append(note)
                whole = [Replicate() if isinstance(each, Partial) else each for each in gradient.placements]
                gradient = gradient.redistribute(placements=whole)
            yield name, own, parameter, gradient

    def _number(self, value: Any, what: str, moment: Moment) -> float | None:
        """Return a loss or a norm as a number; complain where it has fewer digits than float64."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            moment.complaints.append(f"the {what} has the shape {list(value.shape)}: return one number")
            return None
        if not isinstance(value, torch.Tensor | float | int | None):
            moment.complaints.append(f"the {what} is {type(value).__name__}: return one number")
            return None
        if isinstance(value, torch.Tensor) and value.dtype != self.dtype == torch.float64:
            moment.complaints.append(f"the {what} is {short(value.dtype)}: compute it in float64")
        return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)

    def _complain_of_dtypes(self, moment: Moment) -> None:
        model = self.trainer.model
        if self.dtype != torch.float64:
            if all(each.dtype != self.dtype for each in model.parameters()) and any(
                True for _ in model.parameters()
            ):
                moment.complaints.append(
                    f"no parameter is {short(self.dtype)}: the plan, or a constructor that it calls, changes "
                    "the dtype of the model given"
                )
            return
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for own, each in named:
                if is_narrow(each):
                    moment.complaints.append(f"{kind} `{own}` is {short(each.dtype)}: keep it in float64")
