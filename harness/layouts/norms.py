"""Wrong total norms: what one leaves out, counts twice, or knows of this rank alone. Imports torch.

They are held to the norm of the gradients that the ranks hold, so that it is explained of wrong ones, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from lockstep.layouts.factors import CLOSE, describe_factor, either
from lockstep.layouts.layout import Layout
from lockstep.layouts.moment import Moment
from lockstep.layouts.shards import PADDING

Parts = Mapping[tuple[str, int, int], float]
"""Sums of squares, by name, first element and number of elements: replicas have one key."""


def explain_norm(
    actual: Mapping[int, float], expected: float, moments: Mapping[int, Moment], layout: Layout
) -> str:
    """Return what is wrong with a total norm, "" if nothing explains it.

    Args:
        actual: by rank that knows it.
        expected: of the unsharded model.
        moments: what each rank holds.
    """
    if all(abs(each - expected) <= CLOSE * expected for each in actual.values()):
        return ""  # more than rounding, and too little to tell hypotheses apart
    norm = _Norm(actual, {rank: _parts(moment) for rank, moment in moments.items()}, layout)
    if norm.fits(norm.totals) or norm.fits_replicas_of_others():
        return "is that of the gradients that the ranks hold"
    hypotheses = (norm.lacking, norm.repeated, norm.misjudged, norm.alone, norm.miscounted)
    for hypothesis in hypotheses:
        if found := list(hypothesis()):
            return either(found)
    return ""


def _parts(moment: Moment) -> Parts:
    found = {}
    for each in moment.held:
        if each.value is not None:
            inside = each.region[each.region != PADDING]
            key = each.name, int(inside[0]) if inside.numel() else 0, inside.numel()
            found[key] = float(each.value.double().square().sum())
    return found


@dataclass(frozen=True)
class _Norm:
    """A total norm by rank, and the sums of squares that each rank holds."""

    actual: Mapping[int, float]
    held: Mapping[int, Parts]
    layout: Layout

    def fits(self, squares: Mapping[int, float]) -> bool:
        """Return whether the norm of each rank is the root of these."""
        return all(
            abs(value**2 - squares[rank]) <= 1e-10 * self.totals[rank] for rank, value in self.actual.items()
        )

    def seen(self, rank: int, axes: Sequence[str], names: Collection[str] = ()) -> float:
        """Return the squares that a rank and those along axes hold, replicas once, of these names alone."""
        found: dict[tuple[str, int, int], float] = {}
        # Of replicas that differ a rank sees its own, or those of the ranks nearest to it.
        for other in sorted(self.layout.members(axes, rank), key=lambda each: -self._distance(each, rank)):
            found |= self.held[other]
        return sum(square for key, square in found.items() if not names or key[0] in names)

    def _distance(self, rank: int, other: int) -> int:
        """Return on how many axes two ranks differ."""
        return sum(self.layout.at(axis, rank) != self.layout.at(axis, other) for axis in self.layout.large)

    def of(self, axes: Sequence[str], names: Collection[str] = ()) -> dict[int, float]:
        return {rank: self.seen(rank, axes, names) for rank in self.actual}

    @cached_property
    def totals(self) -> Mapping[int, float]:
        return self.of(self.layout.large)

    def fits_replicas_of_others(self) -> bool:
        """Return whether each norm has the replicas of the first rank along some axes, where they differ."""
        views = (
            {rank: self.layout.members(over, rank)[0] for rank in self.actual}
            for over in _subsets(self.layout.large)
        )
        return any(
            self.fits({rank: self.totals[first] for rank, first in view.items()})
            for view in views
            if all(first in self.actual for first in view.values())
        )

    @cached_property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for parts in self.held.values() for name, *_ in parts))

    def _keys(self, name: str, rank: int) -> set[tuple[str, int, int]]:
        return {key for key in self.held[rank] if key[0] == name}

    def is_cut(self, name: str, axis: str) -> bool:
        """Return whether ranks that differ on an axis hold other parts, or one does not hold it."""
        groups = (
            [self._keys(name, each) for each in self.layout.members([axis], rank)] for rank in self.held
        )
        return any(keys != group[0] for group in groups for keys in group)

    def is_replicated(self, axis: str) -> bool:
        """Return whether any part is held by several ranks that differ on an axis alone."""
        return any(
            key in self.held[other]
            for rank, parts in self.held.items()
            for other in self.layout.members([axis], rank)
            if other != rank
            for key in parts
        )

    def lacking(self) -> Iterator[str]:
        """Yield the sums over axes that are missing, where these are the fewest."""
        large = self.layout.large
        cutting = [axis for axis in large if any(self.is_cut(name, axis) for name in self.names)]
        for number in range(1, len(cutting) + 1):
            found = [
                lacking
                for lacking in combinations(cutting, number)
                if self.fits(self.of([axis for axis in large if axis not in lacking]))
            ]
            if found:
                yield from (f"lacks a sum over {' and '.join(each)}" for each in found)
                return

    def repeated(self) -> Iterator[str]:
        """Yield the axes along which replicas count more than once."""
        alone = {rank: sum(parts.values()) for rank, parts in self.held.items()}
        for over in _subsets(self.layout.large):
            several = [axis for axis in over if self.is_replicated(axis)]
            sums = {
                rank: sum(alone[other] for other in self.layout.members(over, rank)) for rank in self.actual
            }
            if several and self.fits(sums):
                yield f"counts what is replicated over {' and '.join(several)} more than once"

    def misjudged(self) -> Iterator[str]:
        """Yield the tensors that are left out, or count several times."""
        for label, names in self._classes():
            of_class = self.of(self.layout.large, names)
            for times in (0, *range(2, 9)):
                if self.fits(
                    {rank: total + (times - 1) * of_class[rank] for rank, total in self.totals.items()}
                ):
                    yield f"leaves out {label}" if not times else f"counts {label} {times} times"

    def alone(self) -> Iterator[str]:
        """Yield the tensors of which a rank counts its own part alone."""
        for label, axis, of_parts in self._of_parts():
            if self.fits({rank: of_parts[rank] for rank in self.actual}):
                yield f"lacks a sum over {axis} of {label}"

    def of_one_part(self) -> Iterator[str]:
        """Yield the tensors of which all ranks count one part: cut ones that are taken for replicas."""
        for label, axis, of_parts in self._of_parts():
            for place in range(self.layout[axis]):
                if self.fits(
                    {rank: of_parts[self.layout.members([axis], rank)[place]] for rank in self.actual}
                ):
                    yield f"counts of {label} the part of {axis} {place} alone"

    def _of_parts(self) -> Iterator[tuple[str, str, Mapping[int, float]]]:
        """Yield tensors, an axis that cuts them, and each rank's squares with its own part of them alone."""
        large = self.layout.large
        for label, names in self._classes():
            for axis in large:
                if any(self.is_cut(name, axis) for name in names):
                    others = [each for each in large if each != axis]
                    yield (
                        label,
                        axis,
                        {
                            rank: self.seen(rank, large)
                            - self.seen(rank, large, names)
                            + self.seen(rank, others, names)
                            for rank in self.held
                        },
                    )

    def miscounted(self) -> Iterator[str]:
        """Yield wrong sums, and parts that stand for the others, which may be the largest ones by chance."""
        yield from self.miscalculated()
        yield from self.of_one_part()

    def miscalculated(self) -> Iterator[str]:
        """Yield sums of norms, squares without a root, and factors."""
        for over in _subsets(self.layout.large):
            others = [axis for axis in self.layout.large if axis not in over]
            roots = {rank: self.seen(rank, others) ** 0.5 for rank in self.held}
            sums = {
                rank: sum(roots[each] for each in self.layout.members(over, rank)) for rank in self.actual
            }
            if self.fits({rank: each**2 for rank, each in sums.items()}):
                yield f"is a sum over {' and '.join(over)} of norms, not the root of a sum of squares"
            most = {
                rank: max(roots[each] for each in self.layout.members(over, rank)) for rank in self.actual
            }
            if self.fits({rank: each**2 for rank, each in most.items()}):
                along = " and ".join(over)
                yield f"is the largest of the norms along {along}, not the root of a sum of squares"
        of_tensors = [self.of(self.layout.large, [name]) for name in self.names]
        if self.fits({rank: sum(each[rank] ** 0.5 for each in of_tensors) ** 2 for rank in self.actual}):
            yield "is a sum of the norms of tensors, not the root of a sum of squares"
        if self.fits({rank: total**2 for rank, total in self.totals.items()}):
            yield "is a sum of squares, without the root"
        factors = [
            value / self.totals[rank] ** 0.5 for rank, value in self.actual.items() if self.totals[rank]
        ]
        if factors and max(factors) - min(factors) <= 1e-9 * abs(factors[0]):
            sizes = {axis: self.layout[axis] for axis in self.layout.large}
            for text, factor in (
                ("is", factors[0]),
                ("is the root of a sum of squares, which is", factors[0] ** 2),
            ):
                if "once too often" in (described := describe_factor(factor, sizes, 1)):
                    yield f"{text} {described}"

    def _classes(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield sets of tensors that a norm may treat alike, each once, with the words for it."""
        found: dict[frozenset[str], list[str]] = {}
        for name in self.names:
            found[frozenset([name])] = [f"`{name}`"]
        for ending in sorted({name.split(".", 1)[-1].lstrip("0123456789.") for name in self.names}, key=len):
            names = frozenset(name for name in self.names if name.endswith(ending))
            found.setdefault(names, [f"`*{ending}`"])
        for axis in self.layout.large:
            cut = frozenset(name for name in self.names if self.is_cut(name, axis))
            for word, names in (("cut over", cut), ("replicated over", frozenset(self.names) - cut)):
                if 0 < len(names) < len(self.names):
                    found.setdefault(names, []).append(
                        f"what is {word} {axis} ({len(names)} of {len(self.names)})"
                    )
        for names, labels in found.items():
            yield labels[0] if len(names) == 1 else either(labels), sorted(names)


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for number in range(1, len(axes) + 1):
        yield from combinations(axes, number)
