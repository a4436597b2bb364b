"""Over which ranks a group's parameters are cut, and over which the cuts are repeated. Runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.engine.api import ShardingStrategy

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""One group, or for hybrid strategies the pair (shard, replicate)."""


@dataclass(frozen=True)
class MeshInfo:
    """The two axes of a mesh that one group lies on, as process groups; None where the user gave none.

    ``sharding``: each rank of it holds a piece of its own. ``replicating``: all ranks of it hold the same
    piece. A rank that shards and replicates is in one group of each.
    """

    sharding: dist.ProcessGroup | None
    replicating: dist.ProcessGroup | None

    @staticmethod
    def of(strategy: ShardingStrategy, groups: ProcessGroups) -> MeshInfo:
        """Return the axes that ``strategy`` makes of ``groups``."""
        if isinstance(groups, tuple):
            return MeshInfo(*groups)
        return MeshInfo(None, groups) if strategy is ShardingStrategy.NO_SHARD else MeshInfo(groups, None)

    @property
    def shard(self) -> dist.ProcessGroup | None:
        """The group to gather from; None where there is one shard."""
        return self.sharding if _size(self.sharding) > 1 else None

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The group to average with that holds the same; None where nobody else does."""
        return self.replicating if _size(self.replicating) > 1 else None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have everything between them: the shard axis, or where there is none the other."""
        group = self.sharding or self.replicating
        assert group is not None
        return group

    @property
    def num_shards(self) -> int:
        return _size(self.sharding)

    @property
    def size(self) -> int:
        """How many ranks average their gradients."""
        return _size(self.sharding) * _size(self.replicating)

    @property
    def index(self) -> int:
        """Which shard this rank holds."""
        return _rank(self.sharding)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of both axes: the one that rank0_only means."""
        return _rank(self.sharding) == _rank(self.replicating) == 0

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The axes that are longer than one, shard first."""
        return tuple(group for group in (self.shard, self.replicate) if group)


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group else 1


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0


def resolve(strategy: ShardingStrategy, given: object, mesh: DeviceMesh | None) -> ProcessGroups:
    """Return the process groups for ``strategy`` that the user's ``process_group`` or ``device_mesh`` names.

    With neither it is the default group; hybrid strategies shard inside a host and replicate across hosts.
    Raises RuntimeError where there is no default group, TypeError and ValueError for what does not fit.
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
    wanted = 2 if strategy.is_hybrid else 1
    if mesh.ndim != wanted:
        raise ValueError(
            f"device_mesh: {strategy.name} needs {wanted} axes"
            f"{' (replicate, shard)' if wanted == 2 else ''}, got a mesh of {mesh.ndim}."
        )
    return (mesh.get_group(1), mesh.get_group(0)) if wanted == 2 else mesh.get_group()


def _checked(strategy: ShardingStrategy, given: object) -> ProcessGroups:
    groups = given if isinstance(given, tuple) else (given,)
    wanted = 2 if strategy.is_hybrid else 1
    if len(groups) != wanted or isinstance(given, tuple) != strategy.is_hybrid:
        raise ValueError(
            f"process_group: {strategy.name} needs "
            f"{'a pair of groups (shard, replicate)' if wanted == 2 else 'one group'}, got {given!r}."
        )
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not in it; wrap the model only on ranks that are."
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup, got {type(group).__name__}.")
    return groups if len(groups) == 2 else groups[0]


def _by_host() -> ProcessGroups:
    """Make groups that shard inside each host and replicate across hosts; a collective of all ranks."""
    size, per_host = dist.get_world_size(), _ranks_per_host()
    if size % per_host:
        raise ValueError(
            f"hybrid sharding: {size} ranks do not fill hosts of {per_host}; "
            "pass process_group=(shard, replicate)."
        )
    hosts = torch.arange(size).view(-1, per_host)
    return _mine(hosts.tolist()), _mine(hosts.T.tolist())


def check_neighbours(axes: MeshInfo, count: int) -> None:
    """Raise ValueError unless the shard axis can be divided into groups of ``count``."""
    size = axes.num_shards
    if not isinstance(count, int) or not 1 < count < size or size % count:
        raise ValueError(
            f"reshard_after_forward: {count!r} is no number of ranks into which {size} can be divided; pass "
            "True, False, None, or a divisor that is neither 1 nor all."
        )


def neighbours(axes: MeshInfo, count: int) -> tuple[int, ...]:
    """Return the ``count`` consecutive ranks of the shard axis that this rank is one of."""
    first = axes.index // count * count
    return tuple(dist.get_process_group_ranks(axes.process_group)[first : first + count])


def _ranks_per_host() -> int:
    """Return how many ranks a host has: as torchrun says, else as many as there are accelerators."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    count = int(told) if told else torch.accelerator.device_count()
    if count < 1:
        raise ValueError(
            "hybrid sharding: how many ranks a host has is unknown; set LOCAL_WORLD_SIZE, or pass "
            "process_group=(shard, replicate) or a 2-D device_mesh."
        )
    return count


def _mine(ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration([list(group) for group in ranks])  # type: ignore[no-untyped-call]
    return mine
