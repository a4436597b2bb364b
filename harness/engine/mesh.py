"""The ranks that shard and replicate a group's parameters, and the device they compute on. Runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.api import ShardingStrategy

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""One group, or for hybrid strategies the pair (shard, replicate)."""


class InPlace(Protocol):
    """The offers of a process group whose ranks read each other's memory, as those of lockstep.shm do."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor; what is sent from it is not copied for that.

        It is free for others when the tensor is gone and all have read what it sent.
        """

    def all_gather_views(self, input: Tensor, read: Callable[[Sequence[Tensor]], None]) -> dist.Work:
        """Start to call `read` with the 1-D `input` of each rank, in rank order, valid until it returns."""

    def reduce_scatter_views(self, input: Tensor, read: Callable[[Sequence[Tensor]], None]) -> dist.Work:
        """Start to call `read` with this rank's piece of the 1-D `input` of each rank, likewise."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, as this rank sees it.

    Read from torch once, when a unit is built: a step needs sizes and backends some thirty times.

    Attributes:
        backends: The backend that serves each type of device.
        in_place: The group, if its ranks read what others send where it lies.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    backends: Mapping[str, str]
    in_place: InPlace | None = None

    @staticmethod
    def of(group: dist.ProcessGroup) -> Axis:
        served = (entry.partition(":") for entry in backend_config(group).split(","))
        backends = {device: backend for device, _, backend in served}
        in_place: Any = group if hasattr(group, "all_gather_views") else None
        return Axis(group, dist.get_world_size(group), dist.get_rank(group), backends, in_place)


@dataclass(frozen=True)
class MeshInfo:
    """The axes of a mesh that one group of parameters lies on; None where the user gave none.

    Attributes:
        sharding: Each rank of it holds a different shard.
        replicating: All ranks of it hold the same shard.
        given: The user's mesh of these axes, (replicate, shard) if there are two: sharded states lie on it.
    """

    sharding: Axis | None
    replicating: Axis | None
    given: DeviceMesh | None = None

    @staticmethod
    def of(strategy: ShardingStrategy, groups: ProcessGroups, given: DeviceMesh | None = None) -> MeshInfo:
        """Return what `strategy` makes of `groups`, which are those of `given` if the user has a mesh."""
        if isinstance(groups, tuple):
            return MeshInfo(Axis.of(groups[0]), Axis.of(groups[1]), given)
        axis = Axis.of(groups)
        is_whole = strategy is ShardingStrategy.NO_SHARD
        return MeshInfo(None, axis, given) if is_whole else MeshInfo(axis, None, given)

    @cached_property
    def shard(self) -> Axis | None:
        """The axis to gather from; None where there is one shard."""
        return self.sharding if self.sharding and self.sharding.size > 1 else None

    @cached_property
    def replicate(self) -> Axis | None:
        """The axis of ranks that hold the same; None where no other rank does."""
        return self.replicating if self.replicating and self.replicating.size > 1 else None

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of the axes that are longer than one, shard first."""
        return tuple(axis.group for axis in (self.shard, self.replicate) if axis)

    @property
    def process_groups(self) -> ProcessGroups:
        """The process groups that `of` was given."""
        if self.sharding and self.replicating:
            return self.sharding.group, self.replicating.group
        return self.process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have all parameters between them: the shard axis, else the replicate axis."""
        axis = self.sharding or self.replicating
        assert axis is not None
        return axis.group

    @cached_property
    def num_shards(self) -> int:
        return self.sharding.size if self.sharding else 1

    @cached_property
    def size(self) -> int:
        """Number of ranks that average their gradients."""
        return self.num_shards * (self.replicating.size if self.replicating else 1)

    @cached_property
    def index(self) -> int:
        """Number of the shard that this rank holds."""
        return self.sharding.rank if self.sharding else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is rank 0 of both axes, the one that rank0_only means."""
        return self.index == (self.replicating.rank if self.replicating else 0) == 0


def resolve(strategy: ShardingStrategy, given: object, mesh: DeviceMesh | None) -> ProcessGroups:
    """Return the process groups for `strategy` from the user's `process_group` or `device_mesh`.

    With neither it is the default group; hybrid strategies shard inside a host and replicate across hosts.

    Raises:
        RuntimeError: If there is no default group.
        TypeError, ValueError: If the groups do not fit the strategy.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group: call torch.distributed.init_process_group first."
        )
    if given is not None and mesh is not None:
        raise ValueError("process_group and device_mesh say the same thing twice; pass one of them.")
    if mesh is not None:
        given = _groups_of(mesh, strategy)
    elif given is None:
        given = _by_host() if strategy.is_hybrid else dist.group.WORLD
    return _checked(strategy, given)


def _groups_of(mesh: DeviceMesh, strategy: ShardingStrategy) -> object:
    wanted, axes = (2, " (replicate, shard)") if strategy.is_hybrid else (1, "")
    if mesh.ndim != wanted:
        raise ValueError(
            f"device_mesh: {strategy.name} needs {wanted} axes{axes}, got a mesh of {mesh.ndim}."
        )
    return (mesh.get_group(1), mesh.get_group(0)) if wanted == 2 else mesh.get_group()


def _checked(strategy: ShardingStrategy, given: object) -> ProcessGroups:
    groups = given if isinstance(given, tuple) else (given,)
    wanted, needed = (2, "a pair of groups (shard, replicate)") if strategy.is_hybrid else (1, "one group")
    if len(groups) != wanted or isinstance(given, tuple) != strategy.is_hybrid:
        raise ValueError(f"process_group: {strategy.name} needs {needed}, got {given!r}.")
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not in it; wrap the model only on ranks that are."
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup, got {type(group).__name__}.")
    return groups if len(groups) == 2 else groups[0]


def _by_host() -> ProcessGroups:
    """Make groups that shard inside each host and replicate across hosts; a collective of all ranks.

    A host has as many ranks as torchrun's variable says, else as many as it has accelerators.
    """
    by_torchrun = os.environ.get("LOCAL_WORLD_SIZE")
    size = dist.get_world_size()
    per_host = int(by_torchrun) if by_torchrun else torch.accelerator.device_count()
    if per_host < 1:
        raise ValueError(
            "hybrid sharding: how many ranks a host has is unknown; set LOCAL_WORLD_SIZE, or pass "
            "process_group=(shard, replicate) or a 2-D device_mesh."
        )
    if size % per_host:
        raise ValueError(
            f"hybrid sharding: {size} ranks do not fill hosts of {per_host}; "
            "pass process_group=(shard, replicate)."
        )
    hosts = torch.arange(size).view(-1, per_host)
    groups = [dist.new_subgroups_by_enumeration(ranks.tolist())[0] for ranks in (hosts, hosts.T)]  # type: ignore[no-untyped-call]
    return groups[0], groups[1]


def check_neighbours(mesh: MeshInfo, count: int) -> None:
    """Raise ValueError unless the shard axis can be divided into groups of `count`."""
    size = mesh.num_shards
    if not isinstance(count, int) or not 1 <= count <= size or size % count:
        raise ValueError(
            f"reshard_after_forward: {count!r} is no number of ranks into which {size} can be divided; pass "
            "True, False, None, or a divisor."
        )


def as_device(device_id: object, groups: ProcessGroups) -> torch.device | None:
    """Return the device that `device_id` names, with its index; an int counts the host's accelerators.

    As torch, takes the name of a device, too.

    Raises:
        ValueError: If this host has no such device or the backend of `groups` does not serve it.
    """
    if device_id is None:
        return None
    if isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as error:
            raise ValueError(f"device_id={device_id!r} is no name of a device: {error}") from error
    if not isinstance(device_id, int | torch.device):
        raise TypeError(f"device_id: expected an int, a torch.device or its name, got {device_id!r}")
    device, backends = torch.device("cpu"), backend_config(groups)
    if isinstance(device_id, int) or device_id.type != "cpu":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != torch.device(device_id).type:
            raise ValueError(
                f"device_id={device_id}: this host has {accelerator or 'no accelerator'}; "
                "pass torch.device('cpu'), or None for where the parameters are."
            )
        index = device_id if isinstance(device_id, int) else device_id.index
        index = torch.accelerator.current_device_index() if index is None else index
        if index >= (count := torch.accelerator.device_count()):
            raise ValueError(
                f"device_id={device_id}: this host has {count} of {accelerator}, counted from 0."
            )
        device = torch.device(accelerator.type, index)
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"device_id={device_id}: the process group communicates on {backends} only; "
            "pass a device that its backend serves, or a process group of another backend."
        )
    return device


def backend_config(groups: ProcessGroups) -> str:
    """Return the backend of each type of device, such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(groups[0] if isinstance(groups, tuple) else groups))


def device_of(tensors: Iterable[Tensor], groups: ProcessGroups) -> torch.device:
    """Return the device that a unit computes on by default: that of its `tensors`, else by the backend."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in backend_config(groups):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
