"""The comparison of a plan in its real dtype, against a tolerance that the unsharded model gives.

Inside a rank; imports torch, calls no collective.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lockstep.layouts.batches import Batch
from lockstep.layouts.moment import Moment
from lockstep.layouts.reference import Reference, Step, Tensors, train
from lockstep.recorders.tensors import short

FACTOR = 8.0
"""The factor by which a sharded run may be further off than unsharded ones, in the dtype or perturbed."""
_PERTURBED = 3


@functools.lru_cache(maxsize=8)
def tolerances(reference: Reference, dtype: torch.dtype) -> list[Step]:
    """Return by how much each value of each step may be off, a number for each tensor.

    `FACTOR * max(d, p, e)`, where of a tensor of the float64 run `d` is the largest difference of the
    unsharded run in the dtype; `p` that of three float64 runs that start with each parameter times
    `1 + eps u`, `u` uniform in [-1, 1]; `e` the largest value times `eps`, and `eps` that of the dtype.
    """
    task, eps = reference.task, torch.finfo(dtype).eps
    batches = task.batches.of_steps
    runs = [train(task, model_in_dtype(task.build(), dtype), [in_dtype(each, dtype) for each in batches])]
    runs += [train(task, _perturbed(task.build(), eps, seed), batches) for seed in range(_PERTURBED)]

    def largest(right: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        off = [(each - right).abs().max() for each in others]
        return FACTOR * torch.stack([*off, eps * right.abs().max()]).max()

    def of_tensors(right: Tensors, others: Sequence[Tensors]) -> Tensors:
        return {name: largest(each, [other[name] for other in others]) for name, each in right.items()}

    def of_number(right: float, others: Sequence[float]) -> float:
        return float(largest(torch.tensor(right), [torch.tensor(each) for each in others]))

    return [
        Step(
            of_tensors(right.before, [each.before for each in others]),
            of_number(right.loss, [each.loss for each in others]),
            of_tensors(right.gradients, [each.gradients for each in others]),
            of_number(right.norm, [each.norm for each in others]),
            of_tensors(right.after, [each.after for each in others]),
        )
        for right, *others in zip(reference.steps, *runs, strict=True)
    ]


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch with its floating-point tensors in a dtype."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: in_dtype(each, dtype) for name, each in batch.items()}
    return batch


def model_in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model with its floating-point parameters and buffers in a dtype.

    `Module.to` casts complex ones too, such as the cache of a rotary embedding, and drops imaginary parts.
    """
    for each in (*model.parameters(), *model.buffers()):
        if each.is_floating_point():
            each.data = each.data.to(dtype)
    return model


def excess(moments: Sequence[Moment], reference: Reference, dtype: torch.dtype) -> tuple[int, float, str]:
    """Return the first moment at which a value is off by more than its tolerance, how many times as much, and
    the sentence on the worst one; the number of moments, 0 and "" if there is none.
    """
    for place, moment in enumerate(moments):
        if moment.complaints:
            return place, math.inf, moment.complaints[0]
        ratio, text = max(_ratios(moment, reference, dtype), default=(0.0, ""))
        if ratio > 1:
            return place, ratio, f"{text} ({moment.title})"
    return len(moments), 0.0, ""


def _ratios(moment: Moment, reference: Reference, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    allowed = tolerances(reference, dtype)[moment.step]
    right = reference.steps[moment.step]
    for what, value, expected, bound in (
        ("loss", moment.loss, right.loss, allowed.loss),
        ("total norm", moment.norm, right.norm, allowed.norm),
    ):
        if value is not None:
            yield _ratio(what, abs(value - expected), bound, dtype)
    for held, whole in moment.with_expected(reference):
        if held.value is not None and held.value.numel():
            off = float((held.value.double() - held.expected(whole)).abs().max())
            bounds = moment.of_step(allowed)
            yield _ratio(f"{moment.kind} of `{held.name}`", off, float(bounds[held.name]), dtype)


def _ratio(what: str, off: float, bound: float, dtype: torch.dtype) -> tuple[float, str]:
    ratio = off / max(bound, 1e-300) if math.isfinite(off) else math.inf
    return ratio, f"{what} is off by {off:.3g} in {short(dtype)}, where rounding explains {bound:.3g}"


def _perturbed(model: nn.Module, eps: float, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            noise = torch.rand(each.shape, generator=generator, dtype=torch.float64)
            each.mul_(1 + eps * (2 * noise - 1))
    return model
