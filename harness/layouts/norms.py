"""Wrong total norms: what one leaves out, counts twice, or knows of this rank alone. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch

from lockstep.layouts.layout import Layout
from lockstep.layouts.shards import PADDING

Regions = Mapping[int, Mapping[str, torch.Tensor]]
"""The region of each tensor that a rank holds, by rank and name."""


def explain_norm(
    actual: Mapping[int, float],
    wholes: Mapping[str, torch.Tensor],
    held: Regions,
    layout: Layout,
) -> str:
    """Return what is wrong with a total norm, "" if it is no single thing.

    Args:
        actual: by rank.
        wholes: the unsharded gradients.
        held: the region of each tensor that a rank holds.
    """
    squares = {name: whole.reshape(-1).square() for name, whole in wholes.items()}
    total = float(sum(each.sum() for each in squares.values()))

    def fits(expected: Mapping[int, float]) -> bool:
        return all(abs(value**2 - expected[rank]) <= 1e-10 * total for rank, value in actual.items())

    for over in _subsets(layout.large):
        once, often = {}, {}
        for rank in actual:
            of_rank = [held[each] for each in layout.members(over, rank)]
            parts = [(name, region[region != PADDING]) for each in of_rank for name, region in each.items()]
            unique = {
                (name, tuple(region.reshape(-1)[:1].tolist()), region.numel()): (name, region)
                for name, region in parts
            }
            once[rank] = sum(float(squares[name][region].sum()) for name, region in unique.values())
            often[rank] = sum(float(squares[name][region].sum()) for name, region in parts)
        if len(over) < len(layout.large) and fits(once):
            return f"lacks a sum over {' and '.join(axis for axis in layout.large if axis not in over)}"
        if over and fits(often):
            return f"counts what is replicated over {' or '.join(over)} more than once"
    values = list(actual.values())
    if max(values) - min(values) > 1e-10 * abs(total) ** 0.5:
        return ""
    for label, names in _classes(wholes, held, layout):
        of_class = float(sum(squares[name].sum() for name in names))
        for times in (0, *range(2, 9)):
            if fits(dict.fromkeys(actual, total + (times - 1) * of_class)):
                return f"leaves out {label}" if not times else f"counts {label} {times} times"
    return ""


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for number in range(len(axes) + 1):
        yield from combinations(axes, number)


def _classes(
    wholes: Mapping[str, torch.Tensor], held: Regions, layout: Layout
) -> Iterator[tuple[str, list[str]]]:
    """Yield sets of tensors that a norm may treat alike, with the word for each."""
    for name in wholes:
        yield f"`{name}`", [name]
    endings = {name.split(".", 1)[-1].lstrip("0123456789.") for name in wholes}
    for ending in sorted(endings, key=len):
        if len(names := [name for name in wholes if name.endswith(ending)]) > 1:
            yield f"`*{ending}`", names
    for axis in layout.large:
        cut = [name for name in wholes if _is_cut(name, axis, held, layout)]
        for word, names in (
            ("cut over", cut),
            ("replicated over", [name for name in wholes if name not in cut]),
        ):
            if names:
                yield f"what is {word} {axis} ({len(names)} of {len(wholes)})", names


def _is_cut(name: str, axis: str, held: Regions, layout: Layout) -> bool:
    regions = [held[rank].get(name) for rank in layout.members([axis], 0)]
    found = [each for each in regions if each is not None]
    return any(not torch.equal(each, found[0]) for each in found)
