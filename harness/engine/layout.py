"""Offsets of parameters in shards, and the copies in and out of them; needs no process group."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(f"{type(self).__name__}: num_shards must be at least 1, got {self.num_shards}")

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

    @abstractmethod
    def piece_shape(self, index: int, shard: int) -> Sequence[int]:
        """Return the shape in which that part is shown."""


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


@dataclass(frozen=True)
class RowLayout(Layout):
    """Split each parameter along dim 0 as torch.chunk does; a shard has one piece of each, end to end.

    Pieces are padded at their ends to the size of the first. In full, all padding of a parameter comes after
    it.

    >>> layout = RowLayout(shapes=((3, 2), (1,)), num_shards=2)
    >>> layout.starts, layout.shard_numel, layout.padding
    ((0, 8), 5, 3)
    >>> layout.piece(0, shard=1), layout.piece_shape(0, shard=1)
    (Piece(start=4, stop=6, shard_start=0), (1, 2))
    """

    @cached_property
    def in_order(self) -> bool:
        return self.num_shards == 1 or len(self.shapes) == 1

    @cached_property
    def piece_numels(self) -> tuple[int, ...]:
        """Elements of a padded piece of each parameter; a 0-dim parameter is one row."""
        return tuple(
            -(-shape[0] // self.num_shards) * math.prod(shape[1:]) if shape else 1 for shape in self.shapes
        )

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
        size, numel = self.piece_numels[index], self.numels[index]
        start, stop = min(shard * size, numel), min((shard + 1) * size, numel)
        return Piece(start, stop, self.shard_starts[index])

    def piece_shape(self, index: int, shard: int) -> Sequence[int]:
        shape = self.shapes[index]
        if not shape:
            return ()
        rows = -(-shape[0] // self.num_shards)
        return (max(min(rows, shape[0] - shard * rows), 0), *shape[1:])


def copy_out(shards: Sequence[Tensor], full: Tensor, layout: Layout) -> None:
    """Fill `full` (1-D, the layout's padded size) from all `shards`, in which pieces lie row by row."""
    assert isinstance(layout, RowLayout)
    sizes = list(layout.piece_numels)
    parameters = torch.split(full, [size * layout.num_shards for size in sizes])
    for index, shard in enumerate(shards):
        for parameter, piece, size in zip(parameters, torch.split(shard, sizes), sizes, strict=True):
            parameter[index * size : (index + 1) * size].copy_(piece)


def copy_in(values: Sequence[Tensor | None], packed: Tensor, layout: Layout) -> None:
    """Fill `packed`, the shards end to end, with one value per parameter, in its shape and any dtype.

    Padding, and what belongs to a value of None, becomes zero.
    """
    if isinstance(layout, RowLayout):
        _copy_in_rows(values, packed.view(layout.num_shards, -1), layout)
        return
    for value, view in zip(values, layout.views(packed), strict=True):
        view.zero_() if value is None else view.copy_(value)
    packed[layout.numel :].zero_()


def _copy_in_rows(values: Sequence[Tensor | None], shards: Tensor, layout: RowLayout) -> None:
    for value, start, size in zip(values, layout.shard_starts, layout.piece_numels, strict=True):
        into = shards[:, start : start + size]
        if value is None or size == 0:
            into.zero_()
            continue
        flat = value.reshape(-1)
        num_whole = flat.numel() // size
        into[:num_whole].copy_(flat[: num_whole * size].view(num_whole, size))
        if num_whole < layout.num_shards:
            rest = flat[num_whole * size :]
            into[num_whole, : rest.numel()].copy_(rest)
            into[num_whole, rest.numel() :].zero_()
            into[num_whole + 1 :].zero_()
