"""Ranks of fake worlds: one process stands for one of them while it runs an item.

Used on both sides, by marks and runs that name the backend `fake`; must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.bounds import is_whole, shown

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


def check_options(options: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the options of a mark, with an `as_rank` as a tuple.

    Raises:
        ValueError: one that fake worlds alone have makes no sense; the message says what to write.
    """
    given, shows = options.get("as_rank"), options.get("made_up_values", False)
    if not isinstance(shows, bool):
        raise ValueError(f"ranks(made_up_values={shown(shows)}): made_up_values is True or False")
    if options.get("backend") != "fake":
        option = "made_up_values=True" if given is None else f"as_rank={shown(given)}"
        raise ValueError(f"ranks({option}): only in a fake world: add backend='fake'")
    return dict(options) if given is None else {**options, "as_rank": _checked_ranks(given, min(sizes))}


def _checked_ranks(given: Any, size: int) -> tuple[int, ...]:
    """Return a rank or a list of ranks of a world of `size` as a tuple."""
    error = f"ranks(as_rank={shown(given)})"
    ranks = tuple(given) if isinstance(given, list | tuple) else (given,)
    for rank in ranks:
        if not is_whole(rank):
            raise ValueError(f"{error}: write a rank, or a list of ranks: as_rank=[0, 511]")
        if not 0 <= rank < size:
            raise ValueError(f"{error}: a world of {size} has the ranks 0 to {size - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"{error}: name at least one rank, and none twice")
    return ranks
