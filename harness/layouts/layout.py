"""A layout: the axes of a plan, their sizes, and this rank's place on each. Inside a rank; imports torch."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.backends import BACKENDS
from lockstep.backends.gloo import MOST_WAITING
from lockstep.recorders.collectives import Collective
from lockstep.recorders.torch_internals import group_of

__tracebackhide__ = True

_ended: list[list[dist.ProcessGroup]] = []
"""Groups of layouts that are closed, whose destructors are to run together."""

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""The axes that every layout has; those that a test does not name are of size 1."""
DATA_AXES = ("dp", "dp_replicate", "fsdp", "dp_shard", "ep")
"""The axes along which ranks have different rows of a batch."""
COPIES = "copies"
"""The axis of ranks that a drawn layout leaves over: each copy of it computes the same."""


class Layout:
    """A mesh of the world's ranks, with a name for each axis. Every rank must make it.

    Ranks are numbered along the last axis first. The mesh and its groups are of the axes larger than 1; they
    end with `close`, which the fixture `layout` calls, or with a block `with Layout(...) as layout`.

    Attributes:
        sizes: all axes, the outermost first.
        name: the axes larger than 1, as in "dp2-tp2".
        asked: axes of which a size, a coordinate, a group or a part was asked for.

    Args:
        sizes: as above; their product is the size of the world.
        device_type: of the mesh.
        hosts: name of the host of each rank, where they are on several.

    Raises:
        ValueError: the world has another number of ranks.
    """

    def __init__(self, sizes: Mapping[str, int], device_type: str = "cpu", hosts: Sequence[str] = ()) -> None:
        self.sizes = {**sizes, **{axis: 1 for axis in AXES if axis not in sizes}}
        self.asked: set[str] = set()
        self._hosts = hosts
        large = {axis: size for axis, size in sizes.items() if size > 1}
        self.name = "-".join(f"{axis}{size}" for axis, size in large.items()) or "one rank"
        self._large = large
        self._mesh: DeviceMesh | None = None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        world = dist.get_world_size() if dist.is_initialized() else 1
        if math.prod(large.values()) != world:
            raise ValueError(f"{self.name} has {math.prod(large.values())} ranks, this world {world}")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if large:
            shape = tuple(large.values())
            self._mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(large))
            dist.barrier()  # no rank may end a group to which another one still connects

    def __repr__(self) -> str:
        return f"<layout {self.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis."""
        if axis not in self.sizes:
            raise KeyError(f"{axis!r}: this layout has the axes {', '.join(self.sizes)}")
        self.asked.add(axis)
        return self.sizes[axis]

    def at(self, axis: str, rank: int | None = None) -> int:
        """Return the coordinate of a rank on an axis, from 0; of this rank by default."""
        return self._place(axis, rank) if self[axis] > 1 else 0

    def _place(self, axis: str, rank: int | None) -> int:
        size, place = self.sizes[axis], self.rank if rank is None else rank
        for inner in reversed(self._large):
            if inner == axis:
                return place % size
            place //= self._large[inner]
        return 0

    def part(self, axes: str | Sequence[str], rank: int | None = None) -> tuple[int, int]:
        """Return which part of how many a rank has of what these axes cut, the first one outermost."""
        index, count = 0, 1
        for axis in as_axes(axes):
            index, count = index * self[axis] + self.at(axis, rank), count * self[axis]
        return index, count

    @property
    def large(self) -> tuple[str, ...]:
        """The axes larger than 1."""
        return tuple(self._large)

    @property
    def across_hosts(self) -> tuple[str, ...]:
        """The axes along which neighbours are on different hosts; none on one host."""
        hosts = self._hosts
        return tuple(
            axis
            for axis in (self._large if hosts else ())
            if any(
                hosts[rank] != hosts[each]
                for rank in range(len(hosts))
                for each in self.members([axis], rank)
            )
        )

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the axes larger than 1. Keep no reference to it when the test has ended."""
        if self._mesh is None:
            raise RuntimeError(f"{self.name}: the layout has no mesh, or has ended")
        return self._mesh

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of this rank and those that differ from it on these axes alone.

        That of several axes is made at its first use: all ranks of it must call this.

        Raises:
            ValueError: all of them are of size 1, where there is no group to communicate in.
        """
        large = tuple(axis for axis in self._large if axis in axes)
        if unknown := [axis for axis in axes if axis not in self.sizes]:
            raise KeyError(f"{unknown[0]!r}: this layout has the axes {', '.join(self.sizes)}")
        self.asked.update(axes)
        if not large:
            raise ValueError(
                f"group({', '.join(map(repr, axes))}): of size 1 in {self.name}, where there is no group: "
                f'ask first if layout["{axes[0] if axes else "tp"}"] > 1'
            )
        if len(large) == 1:
            return self.mesh.get_group(large[0])
        if len(large) == len(self._large):
            assert dist.group.WORLD is not None, "a layout has a default group"
            return dist.group.WORLD
        if large not in self._groups:
            made = dist.new_group(self.members(large), use_local_synchronization=True)
            assert made is not None, "this rank is a member"
            self._groups[large] = made
        return self._groups[large]

    def members(self, axes: Sequence[str], rank: int | None = None) -> list[int]:
        """Return the ranks that differ from a rank on these axes alone, itself included, in order."""
        others = [axis for axis in self._large if axis not in axes]
        mine = [self._place(axis, rank) for axis in others]
        world = range(math.prod(self._large.values()))
        return [each for each in world if [self._place(axis, each) for axis in others] == mine]

    def by_axes(self, collectives: Iterable[Collective]) -> dict[str, list[Collective]]:
        """Return the collectives of a log by the axes of their groups: "tp", or "dp-cp" of two.

        A group that is not of all ranks along some axes has the key of the axes on which its ranks differ. It
        must be called before the layout ends.
        """
        found: dict[str, list[Collective]] = {}
        for each in collectives:
            ranks = dist.get_process_group_ranks(group_of(each.group))
            axes = (axis for axis in self._large if len({self._place(axis, rank) for rank in ranks}) > 1)
            found.setdefault("-".join(axes), []).append(each)
        return found

    def slice(self, tensor: torch.Tensor, axes: str | Sequence[str], dim: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor that is cut over axes, as a view.

        Parts are those of `torch.chunk`: the last ones may be shorter, or empty.
        """
        index, count = self.part(axes)
        return chunk(tensor, index, count, dim)

    def close(self) -> None:
        """End the mesh and its groups. Their threads of gloo may end later, with those of others."""
        groups = [] if self._mesh is None else self._mesh.get_all_groups()
        ended = [group for group in (*groups, *self._groups.values()) if group is not dist.group.WORLD]
        self._mesh = None
        self._groups.clear()
        for group in ended:
            dist.destroy_process_group(group)
        _ended.extend([group] for group in ended)
        if len(_ended) > MOST_WAITING:
            del groups, ended, group
            gc.collect()  # models refer to the mesh, often in cycles, and it to its groups
            BACKENDS["gloo"].release(*_ended)
            _ended.clear()


def as_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Return axes that are given as one name, or as several."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def chunk(tensor: torch.Tensor, index: int, count: int, dim: int = 0) -> torch.Tensor:
    """Return part `index` of `count`, as `torch.chunk` cuts; behind the last one it is empty."""
    length = tensor.shape[dim]
    each = -(-length // count)
    start = min(index * each, length)
    return tensor.narrow(dim, start, min(each, length - start))
