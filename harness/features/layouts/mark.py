"""The mark `layouts`, and the layouts that it asks for.

Used on both sides at collection; must not import torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.bounds import MOST_PROCESSES, MOST_RANKS, is_whole, shown
from lockstep.marker import MarkError

OF_RANKS = ("backend", "fresh", "timeout", "needs", "hosts")
"""Options of the core that are those of the mark `ranks`, and no axes."""
FAKE = "fake"
"""The backend of worlds that one process stands for."""
AGAIN = "-again"
"""The end of the names of layouts that run for the second time."""
_AXIS = re.compile(r"[a-z][a-z_]*")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of each axis, the outermost first.

    Attributes:
        again: whether the layout runs for the second time, in the other order.
    """

    of_axes: tuple[tuple[str, int], ...]
    again: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.of_axes)

    @property
    def name(self) -> str:
        """The axes larger than 1, as in "dp2-tp2", or "dp2-tp2-again"."""
        name = "-".join(f"{axis}{size}" for axis, size in self.of_axes if size > 1)
        return f"{name}{AGAIN}" if self.again else name


@dataclass(frozen=True, slots=True)
class LayoutsMark:
    """A validated mark `layouts(at_most=8, both_orders=False, backend=None, ..., **axes)`."""

    layouts: tuple[Sizes, ...]
    """Smallest first; then, in both orders, all of them again, the smallest last."""
    of_ranks: Mapping[str, Any] = field(default_factory=dict)


def parse_mark(args: tuple[Any, ...], options: Mapping[str, Any], added: Collection[str] = ()) -> LayoutsMark:
    """Return what a mark asks for.

    Args:
        added: options that features have added to the mark `ranks`, which are no axes either.

    Raises:
        MarkError: its arguments make no sense; the message says which, and what to write.
    """
    example = "write layouts(dp=(1, 2), tp=(1, 2), at_most=8)"
    if args:
        raise MarkError(f"layouts({shown(args[0])}): axes have names: {example}")
    at_most = options.get("at_most", 8)
    most = MOST_RANKS if options.get("backend") == FAKE else MOST_PROCESSES
    if not is_whole(at_most) or not 2 <= at_most <= most:
        raise MarkError(f"layouts(at_most={shown(at_most)}): a number of ranks from 2 to {most}")
    if options.get("backend") == FAKE and not is_whole(options.get("as_rank", 0)):
        raise MarkError(f"layouts(as_rank={shown(options['as_rank'])}): one rank, which each layout runs as")
    both = options.get("both_orders", False)
    if not isinstance(both, bool) or (both and options.get("fresh")):
        raise MarkError(
            f"layouts(both_orders={shown(both)}): True or False, and not with fresh=True: new processes have "
            "no state of other layouts"
        )
    of_ranks = {name: value for name, value in options.items() if name in OF_RANKS or name in added}
    axes = {n: sizes for n, sizes in options.items() if n not in (*of_ranks, "at_most", "both_orders")}
    for name, sizes in axes.items():
        are_sizes = isinstance(sizes, tuple | list) and bool(sizes) and all(map(is_whole, sizes))
        if not are_sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            single = f", {name}=({shown(sizes)},)" if is_whole(sizes) and sizes > 0 else ""
            raise MarkError(
                f"layouts({name}={shown(sizes)}): no option of this name, nor sizes of an axis, which are "
                f"a tuple of different whole numbers from 1 on{single}: {example}"
            )
        if not _AXIS.fullmatch(name):
            raise MarkError(f"layouts({name}=...): an axis is a word of lower-case letters: {example}")
    layouts = _layouts(axes, at_most)
    if not layouts:
        given = ", ".join(f"{name}={shown(sizes)}" for name, sizes in axes.items())
        raise MarkError(f"layouts({given}): no layout has 2 to at_most={at_most} ranks: {example}")
    if both:
        layouts += tuple(replace(each, again=True) for each in reversed(layouts))
    # Ids of items name one rank of a fake world alone: it is the first one of each layout.
    return LayoutsMark(layouts, {"as_rank": 0, **of_ranks} if of_ranks.get("backend") == FAKE else of_ranks)


def _layouts(axes: Mapping[str, Any], at_most: int) -> tuple[Sizes, ...]:
    each = (Sizes(tuple(zip(axes, sizes, strict=True))) for sizes in itertools.product(*axes.values()))
    wanted = [sizes for sizes in each if 2 <= sizes.ranks <= at_most]
    return tuple(sorted(wanted, key=_order))


def _order(layout: Sizes) -> tuple[int, int, list[int]]:
    """Return a key that puts few ranks first, then few axes, then the outer ones."""
    return layout.ranks, layout.name.count("-"), [-size for _, size in layout.of_axes]


def contains(layout: Sizes, smaller: Sizes) -> bool:
    """Return whether a layout has all axes of another one that is not itself, each at least as large."""
    sizes = dict(layout.of_axes)
    return layout.of_axes != smaller.of_axes and all(
        sizes.get(axis, 1) >= size for axis, size in smaller.of_axes
    )
