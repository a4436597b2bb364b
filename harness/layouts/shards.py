"""Shard maps: the part of each parameter of the unsharded model that a rank has. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from lockstep.layouts.layout import Layout, as_axes
from lockstep.recorders.tensors import local_part
from lockstep.recorders.torch_internals import COMPILED

__tracebackhide__ = True

PADDING = -1
"""Mark of an element, in a region, that belongs to no element of the unsharded tensor, and is zero."""


@dataclass(frozen=True)
class Sharded:
    """One cut of a plain parameter.

    Attributes:
        axes: over which it is cut; of several the first is the outermost.
        dim: the dimension that is cut.
        parts: lengths of what is packed along it, such as (32, 16, 16) of a query, key and value: each is
            cut, and a rank holds its part of each.
        padded: whether all ranks hold as much as the first, with zeros at the end.
        rows: in their place, a function of the length, the number of ranks and the place among them, that
            returns the indices along the dimension: interleaved groups, heads that several ranks share.
    """

    axes: str | tuple[str, ...]
    dim: int = 0
    parts: tuple[int, ...] = ()
    padded: bool = False
    rows: Callable[[int, int, int], Sequence[int]] | None = None

    def indices(self, length: int, index: int, count: int) -> torch.Tensor:
        """Return the indices along the dimension that part `index` of `count` holds, int64."""
        if self.rows is not None:
            return torch.as_tensor(self.rows(length, count, index), dtype=torch.int64)
        parts = self.parts or (length,)
        if sum(parts) != length:
            raise ValueError(f"parts={parts} of a dimension of {length}: they are {sum(parts)} long")
        found, start = [], 0
        for part in parts:
            each = -(-part // count)
            positions = torch.arange(index * each, (index + 1) * each)
            inside = positions < part
            found.append(
                torch.where(inside, positions + start, PADDING) if self.padded else positions[inside] + start
            )
            start += part
        return torch.cat(found)


Rule = Sharded | Sequence[Sharded]


@dataclass(frozen=True)
class ShardMap:
    """The cuts of a model's plain parameters, by glob. DTensors say themselves how they are placed.

    The first glob that matches holds; a parameter that none matches is whole on each rank that has it.

    Attributes:
        rules: globs of the unsharded model's names, each with its cut, or with several, in order.
        rename: returns the unsharded model's name for one of a rank's, where stages number layers from 0.
        gradients: returns the gradients by a rank's names, where they are not `.grad`.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    rename: Callable[[str, Layout], str] | None = None
    gradients: Callable[[nn.Module], Mapping[str, torch.Tensor | None]] | None = None

    def __post_init__(self) -> None:
        """Refuse rules that are no cuts.

        Raises:
            TypeError: with the entry, and what to write.
        """
        for pattern, rule in self.rules.items():
            cuts: Any = [rule] if isinstance(rule, Sharded) else rule
            if not isinstance(cuts, tuple | list) or not all(isinstance(each, Sharded) for each in cuts):
                raise TypeError(f"the shard map's entry {pattern!r} is {rule!r}: write Sharded('tp', dim=0)")

    def rule(self, name: str) -> tuple[Sharded, ...]:
        """Return the cuts of a parameter of the unsharded model."""
        for pattern, rule in self.rules.items():
            if fnmatchcase(name, pattern):
                return (rule,) if isinstance(rule, Sharded) else tuple(rule)
        return ()

    def region(
        self, name: str, shape: Sequence[int], layout: Layout, rank: int | None = None
    ) -> torch.Tensor:
        """Return which elements of an unsharded parameter a rank holds: indices into it, flattened.

        Raises:
            ValueError: the rule does not fit the shape.
        """
        region = _numbered(shape)
        for cut in self.rule(name):
            if not -len(shape) <= cut.dim < len(shape):
                raise ValueError(f"the shard map cuts dim {cut.dim} of `{name}`, which has {len(shape)} dims")
            if unknown := [axis for axis in as_axes(cut.axes) if axis not in layout.sizes]:
                raise ValueError(
                    f"the shard map cuts `{name}` over {unknown[0]!r}: the layout has the axes "
                    f"{', '.join(layout.sizes)}"
                )
            if layout.part(cut.axes, rank)[1] == 1 and cut.rows is None:
                continue
            try:
                along = cut.indices(region.shape[cut.dim], *layout.part(cut.axes, rank))
            except ValueError as error:
                raise ValueError(f"the shard map's entry of `{name}`: {error}") from None
            region = region.index_select(cut.dim, along.clamp(min=0))
            if bool((along == PADDING).any()):
                lying = [1] * region.dim()
                lying[cut.dim] = -1
                region = region.where((along != PADDING).view(lying), PADDING)
        return region

    def cut(self, name: str, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return this rank's part of a tensor of the unsharded model, a copy."""
        return take(whole, self.region(name, whole.shape, layout))

    @torch.no_grad()
    def write(self, model: nn.Module, unsharded: nn.Module, layout: Layout) -> None:
        """Fill a model that was built sharded with its parts of the unsharded one, and whole buffers."""
        whole = dict(unsharded.named_parameters(remove_duplicate=False))
        for own, parameter in model.named_parameters():
            name = self.name(own, layout)
            if name not in whole:
                raise ValueError(
                    f"`{own}` is `{name}` by the shard map, which the unsharded model does not have"
                )
            region = region_of(name, parameter, whole[name].shape, self, layout)
            local = local_part(parameter)
            if region.shape != local.shape:
                raise ValueError(
                    f"`{own}` has the shape {list(local.shape)}, its part {list(region.shape)}: "
                    "the shard map has another cut"
                )
            local.copy_(take(whole[name], region))
        buffers = dict(unsharded.named_buffers())
        for own, buffer in model.named_buffers():
            if (name := self.name(own, layout)) in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def name(self, own: str, layout: Layout) -> str:
        """Return the unsharded model's name for one of this rank's, whose module may be compiled."""
        own = own.replace(COMPILED, "")
        return own if self.rename is None else self.rename(own, layout)

    def axes(self, name: str) -> set[str]:
        """Return the axes that cut a parameter."""
        return {axis for cut in self.rule(name) for axis in as_axes(cut.axes)}


def region_of(
    name: str, tensor: torch.Tensor, shape: Sequence[int], shards: ShardMap, layout: Layout
) -> torch.Tensor:
    """Return which elements of the unsharded tensor a rank's holds.

    A DTensor has placements; as large as the unsharded tensor, they say all. A smaller one is a part by the
    map that is sharded further, as FSDP2 does with what tensor parallelism by hand has cut.
    """
    if not isinstance(tensor, DTensor):
        return shards.region(name, shape, layout)
    region = _numbered(shape) if tensor.shape == torch.Size(shape) else shards.region(name, shape, layout)
    placements = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
    # Without a source rank each rank cuts its own copy: no collective.
    cut = distribute_tensor(region, tensor.device_mesh, placements, src_data_rank=None)
    return cut.to_local().cpu()


def take(whole: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that a region names, zero where it has padding."""
    found = whole.detach().reshape(-1)[region.clamp(min=0)]
    return found.where(region != PADDING, 0.0)


def _numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))
