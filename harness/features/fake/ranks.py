"""Ranks of fake worlds, as a mark names them: one process stands for one of them while it runs an item.

Used on both sides; must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.bounds import is_whole, shown
from lockstep.marker import MarkError, RanksMark

FEATURE = "fake"
"""Name of the feature, and of its backend."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """The rank of a fake world that an item runs as."""

    rank: int
    size: int
    shows_values: bool
    """Whether the test may read what its collectives return."""


def places(mark: RanksMark) -> list[tuple[int, int]]:
    """Return rank and world size of each item of a mark; without `as_rank` the first rank and the last."""
    as_rank = mark.options.get("as_rank")
    return [
        (rank, size)
        for size in mark.sizes
        for rank in (dict.fromkeys((0, size - 1)) if as_rank is None else as_rank)
    ]


def check_as_rank(mark: RanksMark, given: Any) -> tuple[int, ...] | None:
    """Return a rank or a list of ranks of a mark as a tuple.

    Raises:
        MarkError: the smallest world of the mark has no such ranks, or it is none of a fake world.
    """
    if given is None:
        return None
    error = f"ranks(as_rank={shown(given)})"
    _refuse_other_backends(mark, error)
    ranks, size = tuple(given) if isinstance(given, list | tuple) else (given,), min(mark.sizes)
    for rank in ranks:
        if not is_whole(rank):
            raise MarkError(f"{error}: write a rank, or a list of ranks: as_rank=[0, 511]")
        if not 0 <= rank < size:
            raise MarkError(f"{error}: a world of {size} has the ranks 0 to {size - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise MarkError(f"{error}: name at least one rank, and none twice")
    return ranks


def check_made_up_values(mark: RanksMark, given: Any) -> bool:
    """Return whether the test may read what its collectives return.

    Raises:
        MarkError: it is no boolean, or the mark is none of a fake world.
    """
    if not isinstance(given, bool):
        raise MarkError(f"ranks(made_up_values={shown(given)}): made_up_values is True or False")
    if given:
        _refuse_other_backends(mark, "ranks(made_up_values=True)")
    return given


def _refuse_other_backends(mark: RanksMark, error: str) -> None:
    if mark.backend != FEATURE:
        raise MarkError(f"{error}: only in a fake world: add backend='fake'")
