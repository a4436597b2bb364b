"""Offsets of parameters in shards, and the copies in and out of them; needs no process group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The part of one flattened parameter, in elements, that lies at `shard_start` in one shard."""

    start: int
    stop: int
    shard_start: int

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.stop - self.start

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout(ABC):
    """Say how parameters of these `shapes` lie in `num_shards` shards of one size, and in full."""

    shapes: tuple[Sequence[int], ...]
    num_shards: int

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter; a 0-dim parameter has one."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    @cached_property
    def padding(self) -> int:
        return self.padded_numel - self.numel

    @property
    @abstractmethod
    def in_order(self) -> bool:
        """Whether the shards end to end are the full tensor as it is."""

    @property
    @abstractmethod
    def starts(self) -> tuple[int, ...]:
        """Where each parameter starts in the full tensor, in which it is contiguous."""

    @property
    @abstractmethod
    def shard_numel(self) -> int:
        """Elements of one shard, the same for every shard."""

    def views(self, full: Tensor) -> list[Tensor]:
        """Return views of the 1-D `full` (padded numel), one per parameter, in the parameter's shape."""
        places = zip(self.starts, self.numels, self.shapes, strict=True)
        return [full[start : start + numel].view(shape) for start, numel, shape in places]

    @abstractmethod
    def piece(self, index: int, shard: int) -> Piece:
        """Return the part of parameter `index` that `shard` holds."""

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the part of each parameter that `shard` holds."""
        if shard not in self._pieces:
            self._pieces[shard] = tuple(self.piece(index, shard) for index in range(len(self.shapes)))
        return self._pieces[shard]

    def piece_shapes(self, shard: int) -> tuple[Sequence[int], ...]:
        """Return the shape in which each of these parts is shown."""
        if shard not in self._piece_shapes:
            shapes = (self.piece_shape(index, shard) for index in range(len(self.shapes)))
            self._piece_shapes[shard] = tuple(shapes)
        return self._piece_shapes[shard]

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        return {}

    @cached_property
    def _piece_shapes(self) -> dict[int, tuple[Sequence[int], ...]]:
        return {}

    @abstractmethod
    def piece_shape(self, index: int, shard: int) -> Sequence[int]:
        """Return the shape in which that part is shown."""

    @abstractmethod
    def select(self, index: int, shard: int, value: Tensor) -> Tensor:
        """Return that part of `value`, which has the shape of parameter `index`; may share its memory."""


@dataclass(frozen=True)
class FlatLayout(Layout):
    """Lay parameters end to end, pad the end, split into `num_shards` equal shards.

    >>> layout = FlatLayout(shapes=((2, 2), (1,)), num_shards=2)
    >>> layout.starts, layout.shard_numel, layout.padding
    ((0, 4), 3, 1)
    >>> layout.piece(0, shard=1)
    Piece(start=3, stop=4, shard_start=0)
    """

    in_order = True

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.numels, initial=0))[:-1]

    @cached_property
    def shard_numel(self) -> int:
        return -(-self.numel // self.num_shards)

    def piece(self, index: int, shard: int) -> Piece:
        first = self.starts[index]
        shard_first = shard * self.shard_numel
        start = min(max(shard_first - first, 0), self.numels[index])
        stop = min(max(shard_first + self.shard_numel - first, 0), self.numels[index])
        return Piece(start, stop, first + start - shard_first) if start < stop else Piece(0, 0, 0)

    def piece_shape(self, index: int, shard: int) -> Sequence[int]:
        """1-D, but with one shard the parameter's own."""
        return self.shapes[index] if self.num_shards == 1 else (len(self.piece(index, shard)),)

    def select(self, index: int, shard: int, value: Tensor) -> Tensor:
        piece = self.pieces(shard)[index]
        return value.reshape(-1)[piece.start : piece.stop]


@dataclass(frozen=True)
class RowLayout(Layout):
    """Split each parameter along one dim as torch.chunk does; a shard has one piece of each, end to end.

    Pieces are contiguous, and padded at their ends to the size of the first. In full, all padding of a
    parameter comes after it. A row is an index of the dim that is split.

    Attributes:
        dims: The dim of each parameter that is split; empty for dim 0 of all.

    >>> layout = RowLayout(shapes=((3, 2), (1,)), num_shards=2)
    >>> layout.starts, layout.shard_numel, layout.padding
    ((0, 8), 5, 3)
    >>> layout.piece(0, shard=1), layout.piece_shape(0, shard=1)
    (Piece(start=4, stop=6, shard_start=0), (1, 2))
    >>> RowLayout(shapes=((2, 3),), num_shards=2, dims=(1,)).piece_shape(0, shard=1)
    (2, 1)
    """

    dims: tuple[int, ...] = ()

    @cached_property
    def in_order(self) -> bool:
        return self.num_shards == 1 or self.num_runs == (1,)

    @cached_property
    def num_runs(self) -> tuple[int, ...]:
        """Into how many runs of the full parameter a piece of it falls; 1: it is contiguous there."""
        return tuple(math.prod(shape[:dim]) for shape, dim in zip(self.shapes, self._dims, strict=True))

    @cached_property
    def piece_numels(self) -> tuple[int, ...]:
        """Elements of a padded piece of each parameter; a 0-dim parameter is one row."""
        first = (self._piece_shape(i, self._num_rows(i)) for i in range(len(self.shapes)))
        return tuple(map(math.prod, first))

    @cached_property
    def shard_numel(self) -> int:
        return sum(self.piece_numels)

    @cached_property
    def shard_starts(self) -> tuple[int, ...]:
        """Where the piece of each parameter starts in a shard."""
        return tuple(accumulate(self.piece_numels, initial=0))[:-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(start * self.num_shards for start in self.shard_starts)

    def piece(self, index: int, shard: int) -> Piece:
        """Return the part that `shard` holds, counted as if the dim that is split came first."""
        size, numel = self.piece_numels[index], self.numels[index]
        start, stop = min(shard * size, numel), min((shard + 1) * size, numel)
        return Piece(start, stop, self.shard_starts[index])

    def piece_shape(self, index: int, shard: int) -> Sequence[int]:
        return self._piece_shape(index, len(self._rows(index, shard)))

    def select(self, index: int, shard: int, value: Tensor) -> Tensor:
        rows = self._rows(index, shard)
        return value.narrow(self._dims[index], rows.start, len(rows)) if value.dim() else value

    @cached_property
    def _dims(self) -> tuple[int, ...]:
        return self.dims or (0,) * len(self.shapes)

    def _num_rows(self, index: int) -> int:
        """Return the number of rows in the first piece."""
        shape = self.shapes[index]
        return -(-shape[self._dims[index]] // self.num_shards) if shape else 1

    def _rows(self, index: int, shard: int) -> range:
        num_rows, shape = self._num_rows(index), self.shapes[index]
        size = shape[self._dims[index]] if shape else 1
        return range(min(shard * num_rows, size), min((shard + 1) * num_rows, size))

    def _piece_shape(self, index: int, num_rows: int) -> Sequence[int]:
        shape, dim = self.shapes[index], self._dims[index]
        return (*shape[:dim], num_rows, *shape[dim + 1 :]) if shape else ()

    def only(self, indices: Sequence[int]) -> RowLayout:
        """Return the layout of these parameters alone."""
        chosen = [(self.shapes[index], self._dims[index]) for index in indices]
        return replace(self, shapes=tuple(s for s, _ in chosen), dims=tuple(dim for _, dim in chosen))


def copy_out(parts: Iterable[Tensor], full: Tensor, layout: Layout) -> None:
    """Fill `full` (1-D, the layout's padded size) from all shards, in which pieces lie end to end.

    Args:
        parts: each (any number of shards, elements of a shard), in order.
    """
    assert isinstance(layout, RowLayout)
    sizes = list(layout.piece_numels)
    parameters = torch.split(full, [size * layout.num_shards for size in sizes])
    first = 0
    for part in parts:
        shards = range(first, first := first + len(part))
        for index, (parameter, pieces) in enumerate(
            zip(parameters, torch.split(part, sizes, dim=1), strict=True)
        ):
            if layout.num_runs[index] == 1:
                parameter.view(layout.num_shards, sizes[index])[shards.start : shards.stop].copy_(pieces)
                continue
            whole = parameter[: layout.numels[index]].view(layout.shapes[index])
            for shard, piece in zip(shards, pieces, strict=True):
                into = layout.select(index, shard, whole)
                into.copy_(piece[: into.numel()].view(into.shape))


def copy_in(values: Sequence[Tensor | None], packed: Tensor, layout: Layout) -> None:
    """Fill `packed`, the shards end to end, with one value per parameter, in its shape and any dtype.

    Padding, and what belongs to a value of None, becomes zero: -0.0 for None where pieces lie row by row.
    """
    if isinstance(layout, RowLayout):
        _copy_in_rows(values, packed.view(layout.num_shards, layout.shard_numel), layout)
        return
    for value, view in zip(values, layout.views(packed), strict=True):
        view.zero_() if value is None else view.copy_(value)
    packed[layout.numel :].zero_()


def _copy_in_rows(values: Sequence[Tensor | None], shards: Tensor, layout: RowLayout) -> None:
    places = zip(values, layout.shard_starts, layout.piece_numels, layout.num_runs, strict=True)
    for index, (value, start, size, num_runs) in enumerate(places):
        into = shards[:, start : start + size]
        if value is None or size == 0:
            into.fill_(-0.0)  # see `Usage`
            continue
        if num_runs > 1:
            for shard, piece in enumerate(into):
                selected = layout.select(index, shard, value)
                piece[: selected.numel()].view(selected.shape).copy_(selected)
                piece[selected.numel() :].zero_()
            continue
        flat = value.reshape(-1)
        num_whole = flat.numel() // size
        into[:num_whole].copy_(flat[: num_whole * size].view(num_whole, size))
        if num_whole < layout.num_shards:
            rest = flat[num_whole * size :]
            into[num_whole, : rest.numel()].copy_(rest)
            into[num_whole, rest.numel() :].zero_()
            into[num_whole + 1 :].zero_()


@dataclass(frozen=True, eq=False)
class Usage:
    """Marks in one packed buffer of gradients, whose sign says if any rank used a parameter.

    -0.0 is the one number that adds nothing, not even a sign: a sum is -0.0 only if all its terms are. So a
    rank sends -0.0 throughout for a parameter that it has not used, and never -0.0 at the mark of one that it
    has: the first element of each shard's piece of it (padding, if that is empty). What is -0.0 at a mark
    of the result was used by no rank, and its gradient is None, for no byte and no collective more.

    Attributes:
        places: Their positions in the buffer, on CPU.
        used: Those of parameters that this rank has used, on the buffer's device.
        needed: In the result: this rank has not used all parameters and looks at them, or they are sent on.
    """

    places: Tensor
    used: Tensor
    needed: bool

    @staticmethod
    def of(layout: RowLayout, used: Sequence[bool], device: torch.device) -> Usage:
        """Return the marks of the parameters of `layout`, none of those without elements."""
        pieces = zip(layout.shard_starts, layout.piece_numels, used, strict=True)
        marked = [(start, mine) for start, size, mine in pieces if size]
        shards = torch.arange(layout.num_shards).view(-1, 1) * layout.shard_numel
        places = shards + torch.tensor([start for start, _ in marked], dtype=torch.int64)
        used_places = places[:, torch.tensor([mine for _, mine in marked], dtype=torch.bool)]
        return Usage(places.view(-1), used_places.reshape(-1).to(device), not all(used))

    def sent_on(self) -> Usage:
        return replace(self, needed=True)

    def piece(self, start: int, stop: int) -> Usage:
        """Return the marks in a piece of the buffer, of which other ranks have used parameters as well."""
        inside = self.places[(self.places >= start) & (self.places < stop)]
        return Usage(inside - start, self.used[:0], self.needed)

    def set(self, packed: Tensor) -> None:
        """Make what is -0.0 at marks of used parameters +0.0."""
        packed.index_add_(0, self.used, packed.new_zeros(self.used.numel()))

    def unused(self, values: Tensor) -> Tensor:
        """Return for each mark in the 1-D `values` whether it is -0.0."""
        marked = values[self.places]
        return (marked == 0) & marked.signbit()


def keep(usage: Usage | None, before: Sequence[Tensor], change: Callable[[], Tensor]) -> Tensor:
    """Return `change()`, rounded from the sum of the 1-D tensors `before`, with the marks of that sum.

    Rounding makes -0.0 of a tiny negative number.
    """
    if usage is None:
        return change()
    unused = torch.stack([usage.unused(each) for each in before]).all(0)
    changed = change()
    places = usage.places.to(changed.device)
    kept = (changed[places] + 0.0).masked_fill_(unused.to(changed.device), -0.0)
    return changed.index_copy_(0, places, kept)
