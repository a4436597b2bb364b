"""Layouts that Hypothesis draws. Inside a rank; imports Hypothesis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from lockstep.layouts.layout import COPIES


def layout_sizes(ranks: int, **axes: Sequence[int]) -> st.SearchStrategy[dict[str, int]]:
    """Return a Hypothesis strategy of the sizes of a layout, `Layout(sizes)`, in a world of so many ranks.

    It shrinks to few ranks, then to few axes larger than 1. Where a layout has fewer ranks than the world,
    copies of it run side by side, on an axis `copies` that no plan knows.

    Args:
        axes: sizes of each axis, the outermost first, as of the mark `layouts`.

    Raises:
        ValueError: the sizes of no layout divide the number of ranks.
    """
    each = (dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values()))
    fitting = [sizes for sizes in each if (size := math.prod(sizes.values())) > 1 and ranks % size == 0]
    if not fitting:
        given = ", ".join(f"{axis}={tuple(sizes)}" for axis, sizes in axes.items())
        raise ValueError(f"layout_sizes({ranks}, {given}): no layout of 2 or more ranks divides {ranks}")

    def order(sizes: dict[str, int]) -> tuple[int, int, list[int]]:
        large, outer_first = sum(size > 1 for size in sizes.values()), [-size for size in sizes.values()]
        return math.prod(sizes.values()), large, outer_first

    drawn = sorted(fitting, key=order)
    return st.sampled_from([{COPIES: ranks // math.prod(sizes.values()), **sizes} for sizes in drawn])
