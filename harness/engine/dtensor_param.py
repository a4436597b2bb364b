"""Parameters that the user sees as `DTensor`s, and their place on a mesh. Runs on ranks.

Axes of data parallelism come first in it, then those that a parameter had as a `DTensor` before sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lockstep.engine.api import ShardingStrategy
from lockstep.engine.config import UnitConfig
from lockstep.engine.param import Param, local_of, set_data
from lockstep.engine.torch_internals import (
    StridedShard,
    concatenated,
    count_as_parameter,
    dtensor_spec,
    local_tensor,
    set_local_tensor,
)


@dataclass(frozen=True)
class DTensorPlacement:
    """The place of the `DTensor` of one parameter on a device mesh.

    Attributes:
        shape: Of the whole parameter.
        dim: The dim along which ranks of the shard axis divide what each has of the parameter.
        given: The place that the parameter had as a `DTensor` before sharding, on the axes of tensor
            parallelism, which modules compute with; None for a plain tensor.
    """

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    dim: int = 0
    given: DTensorPlacement | None = None

    def tensor(self, local: Tensor) -> DTensor:
        """Return the `DTensor` of which this rank holds `local`; shares its memory."""
        meta = torch.empty(self.shape, dtype=local.dtype, device="meta")
        about = DTensor.from_local(
            meta, self.mesh, self.placements, run_check=False, shape=self.shape, stride=meta.stride()
        )
        # `from_local` would copy what is offloaded to the device of the mesh.
        return DTensor(_at_start(local).detach(), dtensor_spec(about), requires_grad=False)  # type: ignore[no-untyped-call]

    def leaf(self, unsharded: Tensor, trainable: bool) -> nn.Parameter:
        """Return the parameter that modules compute with, which lies in the memory of `unsharded`."""
        if self.given is None:
            return nn.Parameter(unsharded, trainable)
        given = self.given
        stride = torch.empty(given.shape, device="meta").stride()
        shown = DTensor.from_local(
            unsharded, given.mesh, given.placements, run_check=False, shape=given.shape, stride=stride
        )
        return _as_parameter(shown, trainable)


@dataclass(frozen=True)
class DTensorParam(Param):
    """One parameter of a unit that the user sees as a `DTensor`."""

    placement: DTensorPlacement

    @property
    def dim(self) -> int:
        return self.placement.dim

    def showing(self, piece: Tensor) -> DTensorParam:
        parameter = _as_parameter(self.placement.tensor(piece), self.parameter.requires_grad)
        return replace(self, parameter=parameter)

    @property
    def piece(self) -> Tensor:
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else local_tensor(self.parameter.grad)

    def hold(self, piece: Tensor) -> None:
        shown = self.placement.tensor(piece)
        # A DTensor has dtype and device of its own, next to those of its local tensor: both are exchanged.
        set_data(self.parameter, shown)
        set_local_tensor(self.parameter, shown)

    def set_gradient(self, gradient: Tensor) -> None:
        # As `DTensorPlacement.tensor`, in an eighth of its time: done for each parameter in each step.
        spec = dtensor_spec(self.parameter)
        self.parameter.grad = DTensor(gradient, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def leaf(self, unsharded: Tensor, trainable: bool) -> Tensor:
        return self.placement.leaf(unsharded, trainable)

    def exchanged(self, found: object) -> Param | None:
        """Accept what `load_state_dict` with `assign=True` puts in the parameter's place."""
        if not (isinstance(found, DTensor) and isinstance(found, nn.Parameter)):
            return None
        place = self.placement
        fits = (found.shape, tuple(found.placements)) == (place.shape, tuple(place.placements))
        return replace(self, parameter=found) if fits else None

    def copy(self) -> DTensorParam:
        """Return a `Param` for the same modules with a parameter of its own; shares the memory."""
        return self.showing(self.piece)


def _as_parameter(tensor: DTensor, trainable: bool) -> nn.Parameter:
    """Return `tensor`, of no graph, as a parameter: nn.Parameter would dispatch a `detach` first."""
    count_as_parameter(tensor)
    tensor.requires_grad = trainable
    return cast(nn.Parameter, tensor)


def place(params: Sequence[Param], wanted: Sequence[object], config: UnitConfig) -> list[DTensorParam]:
    """Return `params`, which are not sharded yet, with their places over the mesh of `config`.

    A `DTensor` keeps its own axes, which come after those of the mesh. They divide it first, and what a rank
    has then is divided over the mesh: where both divide one dim, torch writes that as a strided shard.

    Args:
        wanted: The result of `shard_placement_fn` for each; None means Shard(0).

    Raises:
        ValueError, TypeError: If one cannot be placed so; the message names it.
    """
    mesh, shards = config.dtensor, config.strategy is not ShardingStrategy.NO_SHARD
    assert mesh is not None
    joined: dict[DeviceMesh, DeviceMesh] = {}  # one object for all parameters of the unit
    placed = []
    for param, wish in zip(params, wanted, strict=True):
        where = f"{config.name}: parameter {param.name!r}"
        dim, given = _dim(wish, param, where), _given(param, where)
        everywhere = mesh
        if given:
            everywhere = joined.get(given.mesh) or _joined(mesh, given.mesh, where)
            joined[given.mesh] = everywhere
        replicating = [Replicate()] * (mesh.ndim - shards)
        sharding = [_sharding(dim, given, config.mesh.num_shards, where)] if shards else []
        placements = (*replicating, *sharding, *(given.placements if given else ()))
        place = DTensorPlacement(everywhere, placements, param.shape, dim, given)
        shape = local_of(param.parameter).shape
        placed.append(DTensorParam(param.name, param.parameter, param.refs, shape, place))
    return placed


def _given(param: Param, where: str) -> DTensorPlacement | None:
    parameter = param.parameter
    if not isinstance(parameter, DTensor):
        return None
    placements = tuple(parameter.placements)
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"{where} has the placements {placements}; redistribute it to Shard or Replicate.")
    return DTensorPlacement(parameter.device_mesh, placements, parameter.shape)


def _dim(wanted: object, param: Param, where: str) -> int:
    """Return the dim that `shard_placement_fn` wants, counted from the first."""
    num_dims = len(param.shape)
    if wanted is None:
        return 0
    if not isinstance(wanted, Shard):
        raise TypeError(f"{where}: shard_placement_fn must return None or Shard(dim), got {wanted!r}.")
    if not -num_dims <= wanted.dim < num_dims:
        raise ValueError(f"{where} has {num_dims} dims, but shard_placement_fn wants {wanted!r}.")
    return wanted.dim % num_dims


def _sharding(dim: int, given: DTensorPlacement | None, num_shards: int, where: str) -> Placement:
    """Return how the shard axis divides dim `dim` of what the axes of `given` have divided before."""
    if given is None:
        return Shard(dim)
    axes = [axis for axis, p in enumerate(given.placements) if getattr(p, "dim", None) == dim]
    parts, size = [given.mesh.size(axis) for axis in axes], given.shape[dim]
    if not divides_alike(size, parts, num_shards):
        raise ValueError(
            f"{where} has {size} elements along dim {dim}, which tensor parallelism divides into "
            f"{' times '.join(map(str, parts))} and {num_shards} ranks would divide further: no placement of "
            "torch says where they lie then, and full_tensor() would be wrong. Let shard_placement_fn return "
            f"another dim, or make the size a multiple of {math.prod(parts) * num_shards}."
        )
    factor = math.prod(parts)
    return StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def divides_alike(size: int, parts: Sequence[int], num_shards: int) -> bool:
    """Return whether a strided placement finds a dim of `size` where it is: `parts` divide it, then shards.

    torch takes shards first: of each part they have a piece, and divides these pieces, end to end, by `parts`
    again: where pieces have uneven sizes, what it finds there may be others.
    """
    factor = math.prod(parts)
    if factor == 1 or size % (factor * num_shards) == 0:
        return True
    whole = torch.arange(size)
    there = [_chunks(part, [num_shards]) for part in _chunks(whole, parts)]
    strided = [_chunks(part, [num_shards]) for part in _chunks(whole, [factor])]
    for shard in range(num_shards):
        found = _chunks(torch.cat([pieces[shard] for pieces in strided]), parts)
        if not all(torch.equal(a, pieces[shard]) for a, pieces in zip(found, there, strict=True)):
            return False
    return True


def _chunks(values: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Divide the 1-D `values` by each of `counts` in turn as axes do: last chunks may be empty."""
    divided = [values]
    for count in counts:
        chunks = [part.chunk(count) for part in divided]
        divided = [c for some in chunks for c in (*some, *(values[:0] for _ in range(count - len(some))))]
    return divided


def _joined(mesh: DeviceMesh, given: DeviceMesh, where: str) -> DeviceMesh:
    """Return the mesh that has the axes of both."""
    if mesh.mesh_dim_names and given.mesh_dim_names:
        try:
            return concatenated([mesh, given])
        except RuntimeError:  # of another root, or of the same axis
            pass
    raise ValueError(
        f"{where} is a DTensor over {given}, and is to be sharded over {mesh}: these must be different axes "
        "of one mesh, with names. After mesh = init_device_mesh(device, shape, mesh_dim_names=("
        '"data", "tensor")) shard over mesh["data"] what parallelize_module divided over mesh["tensor"].'
    )


def _at_start(tensor: Tensor) -> Tensor:
    """Return `tensor` with a storage that begins where it does; shares its memory.

    torch 2.13 cannot save a `DTensor` whose local tensor lies further on in its storage.
    """
    if tensor.is_meta or tensor.storage_offset() == 0:
        return tensor
    first = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[first : first + tensor.numel() * tensor.itemsize]
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())
