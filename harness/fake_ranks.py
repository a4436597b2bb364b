"""Ranks of fake worlds: one process stands for one of them while it runs an item.

Used on both sides, by marks and runs that name the backend `fake`; must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLACE = "ranks_place"
"""The parameter of an item of a fake world: its rank and the size of the world."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """The rank of a fake world that an item runs as."""

    rank: int
    size: int
    shows_values: bool = False
    """Whether the test may read what its collectives return."""


def places(sizes: Sequence[int], as_rank: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return rank and world size of each item of a mark; without `as_rank` the first rank and the last."""
    return [
        (rank, size)
        for size in sizes
        for rank in (dict.fromkeys((0, size - 1)) if as_rank is None else as_rank)
    ]


def check_ranks(given: Any, sizes: Sequence[int], backend: object) -> tuple[int, ...]:
    """Return an `as_rank`, a rank or a list of ranks, as a tuple.

    Raises:
        ValueError: it makes no sense; the message says what to write.
    """
    if backend != "fake":
        raise ValueError(f"ranks(as_rank={given!r}): only in a fake world: add backend='fake'")
    error, size = f"ranks(as_rank={given!r})", min(sizes)
    ranks = tuple(given) if isinstance(given, list | tuple) else (given,)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ValueError(f"{error}: write a rank, or a list of ranks: as_rank=[0, 511]")
        if not 0 <= rank < size:
            raise ValueError(f"{error}: a world of {size} has the ranks 0 to {size - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"{error}: name at least one rank, and none twice")
    return ranks
