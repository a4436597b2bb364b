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

    subsets = list(_subsets(layout.large))
    # Where several fit, that which lacks the fewest sums: over replicas alone there is nothing to add.
    for over in reversed(subsets[:-1]):
        if fits({rank: _total(_of_ranks(held, layout.members(over, rank)), squares) for rank in actual}):
            return f"lacks a sum over {' and '.join(axis for axis in layout.large if axis not in over)}"
    alone = {rank: _total(_of_ranks(held, [rank]), squares) for rank in held}
    for over in subsets[1:]:
        if fits({rank: sum(alone[other] for other in layout.members(over, rank)) for rank in actual}):
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


Parts = Mapping[tuple[str, int, int], torch.Tensor]
"""Regions, each once, by name, first element and number of elements."""


def _of_ranks(held: Regions, ranks: Sequence[int]) -> Parts:
    """Return the parts of tensors that ranks hold together, those of replicas once."""
    found = {}
    for rank in ranks:
        for name, region in held[rank].items():
            inside = region[region != PADDING]
            found[name, int(inside[0]) if inside.numel() else 0, inside.numel()] = inside
    return found


def _total(parts: Parts, squares: Mapping[str, torch.Tensor]) -> float:
    return sum(float(squares[name][region].sum()) for (name, *_), region in parts.items())


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
