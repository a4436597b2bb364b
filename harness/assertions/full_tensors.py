"""DTensors in full, many by one collective. Inside a rank; calls torch.distributed."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.recorders.tensors import Part, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOST_BYTES = 1 << 26  # of tensors that are gathered together, besides the last of them


@torch.no_grad()
def full_tensors(tensors: Mapping[str, Part]) -> dict[str, Part]:
    """Return the tensors by the same names, DTensors in full, anything else as it is.

    A collective: every rank of the meshes calls it with the same names. Those that are alike in mesh, sharded
    axis and dtype are gathered together, 64 MiB at a time: `DTensor.full_tensor` takes a collective for each.
    One that no axis divides comes back as its local tensor, in the same memory. None that was a DTensor has a
    history of autograd.
    """
    found: dict[str, Any] = {}
    alike: dict[tuple[Any, ...], dict[str, DTensor]] = {}
    nbytes = Counter[Any]()
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            found[name] = tensor
        elif (axis := _sharded_axis(tensor)) is None:
            found[name] = tensor.full_tensor()
        elif axis < 0:
            found[name] = local_part(tensor)
        else:
            found[name] = None  # keeps its place
            kind: tuple[Any, ...] = (axis, tensor.device_mesh, tensor.dtype)
            alike.setdefault((*kind, nbytes[kind] // _MOST_BYTES), {})[name] = tensor
            nbytes[kind] += tensor.numel() * tensor.itemsize
    for (axis, *_), members in alike.items():
        found |= zip(members, _gathered(list(members.values()), axis), strict=True)
    return found


def _sharded_axis(tensor: DTensor) -> int | None:
    """Return the one axis of the mesh that shards, as torch.chunk does; -1 where none shards.

    None where only `full_tensor` knows how the parts fit together, or how they are sent.
    """
    placing = sys.modules["torch.distributed.tensor"]
    local, mesh = local_part(tensor), tensor.device_mesh
    known = {placing.Shard, placing.Replicate}
    if type(local) is not torch.Tensor or local.device.type != mesh.device_type:
        return None
    if mesh.get_coordinate() is None or not known >= set(map(type, tensor.placements)):
        return None
    axes = [i for i, p in enumerate(tensor.placements) if isinstance(p, placing.Shard) and mesh.size(i) > 1]
    return None if len(axes) > 1 else axes[0] if axes else -1


def _gathered(tensors: Sequence[DTensor], axis: int) -> list[torch.Tensor]:
    """Return tensors that `axis` of one mesh shards, in full, by one all-gather of all their shards."""
    mesh = tensors[0].device_mesh
    placements: list[Any] = [tensor.placements[axis] for tensor in tensors]
    size, dims = mesh.size(axis), [placement.dim for placement in placements]
    rows = [-(-tensor.shape[dim] // size) for tensor, dim in zip(tensors, dims, strict=True)]
    numels = [
        count * (tensor.numel() // max(tensor.shape[dim], 1))
        for tensor, dim, count in zip(tensors, dims, rows, strict=True)
    ]
    sent = local_part(tensors[0]).new_zeros(sum(numels))
    for tensor, place in zip(tensors, torch.split(sent, numels), strict=True):
        local = local_part(tensor)
        place[: local.numel()] = local.reshape(-1)
    of_ranks = sent.new_empty(size, len(sent))
    if len(sent):
        dist.all_gather(list(of_ranks), sent, group=mesh.get_group(axis))
    found = []
    for tensor, dim, count, parts in zip(
        tensors, dims, rows, torch.split(of_ranks, numels, dim=1), strict=True
    ):
        pieces, shape = [], list(tensor.shape)
        for rank, part in enumerate(parts):
            shape[dim] = min(max(tensor.shape[dim] - rank * count, 0), count)
            pieces.append(part[: math.prod(shape)].view(shape))
        found.append(torch.cat(pieces, dim))
    return found
