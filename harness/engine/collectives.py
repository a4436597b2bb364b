"""Every torch.distributed collective the engine runs. Runs on ranks; imports nothing else of the engine.

Reductions return the mean over the ranks of the group. A group of one rank communicates nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")

LOW_PRECISION = (torch.float16, torch.bfloat16)


def gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``full`` (1-D, W * n) with the 1-D ``shard`` (n) of every rank, in rank order."""
    if dist.get_world_size(group) == 1:
        full.copy_(shard)
    elif full.numel():
        _single("all_gather_single", "all_gather_into_tensor")(full, shard, group=group)


def reduce_scatter_mean(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard (1-D, n) of the mean over ranks of ``full`` (1-D, W * n), in its dtype.

    May overwrite ``full``.
    """
    size = dist.get_world_size(group)
    if size == 1 or not full.numel():
        return full.clone()
    if _sums_coarsely(full, group):
        return _exchange_and_sum(full, group).div_(size).to(full.dtype)
    before, after = divide_factors(size)
    shard = full.new_empty(full.numel() // size)
    _single("reduce_scatter_single", "reduce_scatter_tensor")(shard, full.div_(before), group=group)
    return shard.div_(after)


def all_reduce_mean(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over ranks of ``full`` (1-D), in its dtype. May overwrite ``full``."""
    size = dist.get_world_size(group)
    if size == 1 or not full.numel():
        return full.clone()
    if _sums_coarsely(full, group):
        padded = full.new_zeros(-(-full.numel() // size) * size)
        padded[: full.numel()] = full
        gather(padded, reduce_scatter_mean(padded, group), group)
        return padded[: full.numel()]
    before, after = divide_factors(size)
    dist.all_reduce(full.div_(before), group=group)
    return full.div_(after)


def total(values: Tensor, group: dist.ProcessGroup, largest: bool = False) -> Tensor:
    """Return the sum over ranks of ``values``, or the element-wise largest."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite each tensor with that of the group's rank 0."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors if dist.get_world_size(group) > 1 else ():
        if tensor.numel():
            wire = tensor.contiguous()
            dist.broadcast(wire, source, group=group)
            tensor.copy_(wire)


def divide_factors(size: int) -> tuple[float, float]:
    """Return (p, size / p): divide by p before the sum and by the rest after it.

    p is the power of two near sqrt(size): half of the range that a low-precision sum can overflow or
    underflow is kept on each side.
    """
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before), size / before


def _sums_coarsely(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Tell whether the backend would round every partial sum to the tensor's low precision."""
    return tensor.dtype in LOW_PRECISION and f"{tensor.device.type}:nccl" not in dist.get_backend_config(
        group
    )


def _exchange_and_sum(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the sum, in fp32, added in rank order: the same bits on every run."""
    received = torch.empty_like(full)
    dist.all_to_all_single(received, full, group=group)
    parts = received.view(dist.get_world_size(group), -1)
    mine = parts[0].float()
    for part in parts[1:]:
        mine.add_(part)
    return mine


def _single(name: str, older_name: str) -> Callable[..., Any]:
    """Return a collective that torch 2.13 renamed; the older name warns there."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older_name)
    return found


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the picklable ``value`` of every rank, in rank order."""
    size = dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: dist.ProcessGroup) -> T:
    """Return the picklable ``value`` of the group's rank 0."""
    if dist.get_world_size(group) == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group=group)
    return values[0]


def full_tensor(tensor: DTensor) -> Tensor:
    """Return what the ranks of ``tensor``'s mesh hold together, on the mesh's device."""
    there: Any = tensor.to(tensor.device_mesh.device_type)  # annotated as a plain tensor
    full: Tensor = there.full_tensor()
    return full
