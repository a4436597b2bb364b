"""Where parameters lie in a shard: pure arithmetic on element counts, usable without a process group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """Name the part of one parameter that one shard holds, in elements of the flattened parameter.

    The same elements lie at ``shard_start`` in that shard. An empty piece has ``start == stop``.
    """

    start: int
    stop: int
    shard_start: int

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.stop - self.start

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Lay parameters end to end, pad the end, cut into ``num_shards`` equal shards.

    >>> layout = FlatLayout(shapes=((2, 2), (1,)), num_shards=2)
    >>> layout.starts, layout.shard_numel, layout.padding
    ((0, 4), 3, 1)
    >>> layout.piece(0, shard=1)
    Piece(start=3, stop=4, shard_start=0)
    """

    shapes: tuple[Sequence[int], ...]
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(f"FlatLayout: num_shards must be at least 1, got {self.num_shards}")

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter; a 0-dim parameter has one."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter starts in the full flat tensor."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard, the same for every shard."""
        return -(-self.numel // self.num_shards)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    @property
    def padding(self) -> int:
        return self.padded_numel - self.numel

    def piece(self, index: int, shard: int) -> Piece:
        """Return the part of parameter ``index`` that ``shard`` holds."""
        first = self.starts[index]
        shard_first = shard * self.shard_numel
        start = min(max(shard_first - first, 0), self.numels[index])
        stop = min(max(shard_first + self.shard_numel - first, 0), self.numels[index])
        if start == stop:
            return Piece(0, 0, 0)
        return Piece(start, stop, first + start - shard_first)
