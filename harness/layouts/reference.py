"""The unsharded run that layouts are held to, once a process.

Inside a rank; imports torch, calls no collective.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.assertions.parity import MakeOptimizer
from lockstep.layouts.batches import Batch, KeepPart, part_of
from lockstep.layouts.layout import as_axes
from lockstep.layouts.parting import Trace
from lockstep.layouts.shards import ShardMap
from lockstep.recorders.tensors import flat_bytes, named_tensors, short

__tracebackhide__ = True

Loss = Callable[..., torch.Tensor]
"""The loss of a model on a batch; with a parameter `parts` it is given the microbatches of all ranks, too."""
Tensors = dict[str, torch.Tensor]
ROUNDING = 1e-14
"""A part of the norm of all gradients: what is smaller is what their sums round away."""


class Batches:
    """Batches that are equal where all their tensors are, so that runs on them are found again."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.of_steps = tuple(batches)
        digest = hashlib.sha256()
        for name, each in named_tensors(list(batches)).items():
            digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            digest.update(flat_bytes(each.cpu()).numpy().tobytes())
        self._digest = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batches) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


@dataclass(frozen=True)
class Task:
    """The training of an unsharded model, by which its run is found again.

    Attributes:
        parts: keeps a sequence part of a batch.
        terms: auxiliary terms of the loss by name, each a function of the whole batch.
        cuts: of each step, over how many ranks and in how many microbatches the rows are cut; empty where the
            loss does not ask for it.
    """

    build: Callable[[], nn.Module]
    loss: Loss
    optimizer: MakeOptimizer
    batches: Batches
    parts: KeepPart | None = None
    terms: tuple[tuple[str, Loss], ...] = ()
    cuts: tuple[tuple[int, int], ...] = ()

    def run(self, loss: Loss, model: nn.Module, step: int, batch: Batch) -> torch.Tensor:
        """Return the loss, or a term of it, of the batch of a step."""
        found = of_parts(loss, model, batch, *(self.cuts[step] if self.cuts else (1, 1)))
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = f"the shape {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            raise TypeError(f"loss(model, batch) returns {what}: return a tensor of one number")
        return found


def takes_parts(loss: Loss) -> bool:
    return "parts" in inspect.signature(loss).parameters


def of_parts(loss: Loss, model: nn.Module, batch: Batch, data: int = 1, micro: int = 1) -> torch.Tensor:
    """Return the loss of a batch that so many ranks cut, and each of them in so many microbatches."""
    if not takes_parts(loss):
        return loss(model, batch)
    of_ranks = (part_of(batch, index, data) for index in range(data))
    parts = tuple(part_of(each, index, micro) for each in of_ranks for index in range(micro))
    return loss(model, batch, parts=parts)


@dataclass
class Step:
    """One step of the unsharded model: parameters before it, its loss, gradients and their norm."""

    before: Tensors
    loss: float
    gradients: Tensors
    norm: float
    after: Tensors


@dataclass(frozen=True)
class Blocks:
    """The loss of a step and its gradients, by blocks of the batch and auxiliary terms.

    Attributes:
        rows: number of blocks along dim 0.
        sequence: number of parts of each, along the sequence; a block's number counts these first.
        terms: names of auxiliary terms; their gradients follow those of the blocks.
        losses: of each block, nan where nothing is to be predicted, and of each term.
        gradients: of blocks and terms, stacked, by name.
        whole: gradients of the whole batch.
    """

    rows: int
    sequence: int
    terms: tuple[str, ...]
    losses: tuple[float, ...]
    gradients: Tensors
    whole: Tensors

    @functools.cached_property
    def weights(self) -> torch.Tensor | None:
        """The weights of blocks and terms in the loss of the whole batch; None if it is no sum of them."""
        return fit(self.gradients, self.whole)


class Reference:
    """The run of an unsharded model.

    Attributes:
        steps: in order.
        names: of parameters, those of tied ones once.
        tied: the other names of tied ones, each with the one of `names`.

    Raises:
        ValueError: nothing could be concluded from a comparison with it: the message says why.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        model = task.build()
        self._refuse_dtypes(model)
        self.steps = train(task, model, task.batches.of_steps)
        self.names = tuple(self.steps[0].before)
        named = dict(model.named_parameters(remove_duplicate=False))
        first = {id(each): name for name, each in reversed(named.items())}
        self.tied = {name: first[id(each)] for name, each in named.items() if first[id(each)] != name}
        self._refuse_dead_tensors()
        self._blocks: dict[tuple[int, int, int, str], Blocks] = {}
        self._are_moving: set[int] = set()

    @property
    def start(self) -> Tensors:
        """The parameters before training."""
        return self.steps[0].before

    @property
    def has_parts(self) -> bool:
        """Whether a batch can be cut into sequence parts."""
        return self.task.parts is not None

    def trace(self, step: int) -> Trace:
        """Return what the modules compute in a step."""
        trace, model = Trace(), self._model_of(step)
        with trace.record(model):
            self.task.run(self.task.loss, model, step, self.task.batches.of_steps[step]).backward()  # type: ignore[no-untyped-call]
        return trace

    def blocks(self, step: int, rows: int, sequence: int = 1, term: str = "") -> Blocks:
        """Return the gradients of blocks of a step's batch, or of a term on them, computed at first use."""
        key = step, rows, sequence, term
        if key not in self._blocks:
            self._blocks[key] = self._make_blocks(*key)
        return self._blocks[key]

    def refuse_dead_parts(self, rows: int, sequence: int) -> None:
        """Refuse batches of which a part, of so many, moves the loss in no step."""
        for count, are_rows in ((rows, True), (sequence, False)):
            if count < 2 or (key := count if are_rows else -count) in self._are_moving:
                continue
            alive = torch.zeros(count, dtype=torch.bool)
            for step in range(len(self.steps)):
                if bool(alive.all()):
                    break
                blocks = self.blocks(step, *((count, 1) if are_rows else (1, count)))
                for gradient in blocks.gradients.values():
                    alive |= gradient[:count].reshape(count, -1).abs().amax(1) > 0
            if not bool(alive.all()):
                dead = int((~alive).nonzero()[0])
                kind = "the rows" if are_rows else "the sequence"
                raise ValueError(
                    f"part {dead} of {count} of {kind} moves the loss in no step: a rank that loses it would "
                    "go unseen; give it tokens that count"
                )
            self._are_moving.add(key)

    def refuse_dead_experts(self, shards: ShardMap) -> None:
        """Refuse experts that no token of any step reaches: along the dimension that the axis ep cuts."""
        for name, example in self.steps[0].gradients.items():
            for cut in shards.rule(name):
                if "ep" not in as_axes(cut.axes) or cut.rows is not None or cut.parts:
                    continue
                seen = sum(step.gradients[name].abs() for step in self.steps)
                assert isinstance(seen, torch.Tensor), "a step"
                of_each = seen.movedim(cut.dim, 0).reshape(example.shape[cut.dim], -1).amax(1)
                if bool((of_each == 0).any()):
                    dead = int((of_each == 0).nonzero()[0])
                    raise ValueError(
                        f"`{name}` has no gradient at index {dead} of dim {cut.dim}: no token reaches that "
                        "expert; give more tokens, or another seed"
                    )

    def _refuse_dtypes(self, model: nn.Module) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        if not any(each.requires_grad for _, each in named):
            raise ValueError("build() returns a model without a parameter to train")
        for name, each in named:
            if is_narrow(each):
                raise ValueError(f"`{name}` of the reference is {short(each.dtype)}: build it in float64")

    def _refuse_dead_tensors(self) -> None:
        for step, found in enumerate(self.steps):
            if not torch.isfinite(torch.tensor([found.loss, found.norm])).all():
                raise ValueError(f"the reference's loss or gradient is not finite in step {step}")
        for name in self.steps[0].gradients:
            if not any(bool(step.gradients[name].any()) for step in self.steps):
                raise ValueError(
                    f"`{name}` of the reference has no gradient, or zeros, in all steps: nothing of it would "
                    "be compared; freeze it, or give batches that reach it"
                )
            largest, norm = max((float(step.gradients[name].abs().max()), step.norm) for step in self.steps)
            if largest < ROUNDING * norm:
                raise ValueError(
                    f"the gradient of `{name}` of the reference is rounding, {largest:.1g} beside a norm of "
                    f"{norm:.3g}: the loss does not depend on it, and no layout rounds alike; leave it out"
                )
            if torch.equal(self.steps[0].before[name], self.steps[-1].after[name]):
                raise ValueError(
                    f"`{name}` of the reference does not move in {len(self.steps)} steps: give an optimizer "
                    "that moves it"
                )

    def _model_of(self, step: int) -> nn.Module:
        """Return the unsharded model as it was before a step."""
        model = self.task.build()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.steps[step].before[name])
        return model

    def _make_blocks(self, step: int, rows: int, sequence: int, term: str) -> Blocks:
        task, batch = self.task, self.task.batches.of_steps[step]
        loss_of = dict(task.terms)[term] if term else task.loss
        terms = () if term else task.terms
        model = self._model_of(step)
        losses, found = [], []
        for index in range(rows * sequence):
            kept = part_of(batch, index // sequence, rows)
            if sequence > 1:
                assert task.parts is not None, "sequence parts are asked for where there is a function"
                kept = task.parts(kept, index % sequence, sequence)
            loss = of_parts(loss_of, model, kept)
            for _, each in terms:
                loss = loss - of_parts(each, model, kept)
            losses.append(float(loss.detach()))
            found.append(_gradients(model, loss))
        for _, each in terms:
            losses.append(float((loss := task.run(each, model, step, batch)).detach()))
            found.append(_gradients(model, loss))
        gradients = {name: torch.stack([each[name] for each in found]) for name in found[0]}
        whole = (
            _gradients(model, task.run(loss_of, model, step, batch)) if term else self.steps[step].gradients
        )
        return Blocks(rows, sequence, tuple(name for name, _ in terms), tuple(losses), gradients, whole)


def train(task: Task, model: nn.Module, batches: Sequence[Batch]) -> list[Step]:
    """Train an unsharded model, and return its steps, in float64 whatever its dtype is."""
    steps, optimizer = [], task.optimizer(model.parameters())
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        before = _copies(model)
        loss = task.run(task.loss, model, number, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: torch.zeros_like(each).double()
            if each.grad is None
            else each.grad.detach().clone().double()
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
        optimizer.step()
        steps.append(Step(before, float(loss.detach()), gradients, norm, _copies(model)))
    return steps


def is_narrow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has fewer digits than float64."""
    has_digits = tensor.is_floating_point() or tensor.is_complex()
    return has_digits and tensor.dtype not in (torch.float64, torch.complex128)


def fit(gradients: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the weights of gradients that add up to the target, by least squares; None if it is no such sum.

    A gradient that is zero gets the weight nan.

    Args:
        gradients: of several losses, stacked, by name.
        target: by some of these names.
    """
    basis = torch.cat([each.reshape(len(each), -1) for each in (gradients[name] for name in target)], 1)
    wanted = torch.cat([each.reshape(-1) for each in target.values()])
    # Each tensor counts as much as any other, however small its values are.
    scale = torch.cat([each.abs().amax().clamp(min=1e-300).expand(each.numel()) for each in target.values()])
    alive = basis.abs().amax(1) > 0
    basis, wanted = (basis / scale)[alive], wanted / scale
    if wanted.numel() < 2 * len(basis) or not len(basis) or not bool(torch.isfinite(wanted).all()):
        return None
    solved = torch.linalg.lstsq(basis.T, wanted[:, None], driver="gelsd").solution[:, 0]
    if float((solved @ basis - wanted).abs().max()) > 1e-9 or int(torch.linalg.matrix_rank(basis)) < len(
        basis
    ):
        return None
    weights = torch.full(alive.shape, torch.nan, dtype=torch.float64)
    weights[alive] = solved
    return weights


def _gradients(model: nn.Module, loss: torch.Tensor) -> Tensors:
    """Return the gradients of a loss: zeros where it has none, or, without a token to predict, is nan."""
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    model.zero_grad()
    if bool(torch.isfinite(loss)) and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]  # torch.autograd.grad has no re-entrant checkpoints
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.nan_to_num()
        for name, each in named.items()
    }


def _copies(model: nn.Module) -> Tensors:
    return {name: each.detach().clone().double() for name, each in model.named_parameters()}


@functools.lru_cache(maxsize=8)
def reference_of(task: Task) -> Reference:
    """Return the run of a task, computed once in a process."""
    return Reference(task)
