"""One wrong tensor as all ranks hold it, and the single changes that would explain it. Imports torch.

Each hypothesis returns a sentence, or "" where it does not hold on all ranks: rather none than a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch

from lockstep.layouts.layout import Layout
from lockstep.layouts.shards import PADDING, take

Values = Mapping[int, torch.Tensor]
"""A tensor by rank."""

CLOSE = 1e-9
"""Tolerance relative to the largest value: above rounding, and far below what two hypotheses differ by."""

_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
}


@dataclass(frozen=True, eq=False)
class Suspect:
    """A wrong tensor.

    Attributes:
        whole: of the unsharded model.
        values: by rank that holds it.
        regions: the elements of `whole` that a rank holds.
        microbatches: of the step.
        earlier: the unsharded gradients of the steps before, the last one first; of a parameter its value
            before the step.
    """

    name: str
    kind: str
    layout: Layout
    whole: torch.Tensor
    values: Values
    regions: Values
    microbatches: int
    earlier: Sequence[torch.Tensor] = ()

    @cached_property
    def expected(self) -> Values:
        """The part of the unsharded tensor that each rank should hold."""
        return self.parts_of(self.whole)

    @cached_property
    def error(self) -> float:
        """The largest difference on any rank; infinite where a value is not finite."""
        differences = [(value - self.expected[rank]).abs().reshape(-1) for rank, value in self.values.items()]
        return float(torch.cat(differences).nan_to_num(math.inf).max())

    @cached_property
    def scale(self) -> float:
        return float(self.whole.abs().max()) or 1.0

    @cached_property
    def assembled(self) -> torch.Tensor | None:
        """The unsharded tensor of what ranks hold; None where replicas differ, or an element is nowhere."""
        found = torch.full((self.whole.numel(),), torch.nan, dtype=self.whole.dtype)
        for rank, value in self.values.items():
            inside = self.regions[rank] != PADDING
            found[self.regions[rank][inside]] = value[inside]
        held = all(
            _is_close(
                take(found, self.regions[rank]), value.where(self.regions[rank] != PADDING, 0.0), self.scale
            )
            for rank, value in self.values.items()
        )
        return found.view_as(self.whole) if held and bool(torch.isfinite(found).all()) else None

    def parts_of(self, whole: torch.Tensor) -> Values:
        return {rank: take(whole, region) for rank, region in self.regions.items()}

    def equals(self, values: Values, expected: Values | None = None) -> bool:
        """Return whether values are those that are expected, of this tensor by default, on all ranks."""
        expected = self.expected if expected is None else expected
        return all(_is_close(value, expected[rank], self.scale) for rank, value in values.items())

    def groups(self, axes: Sequence[str]) -> Iterator[list[int]]:
        """Yield the ranks that differ on these axes alone and hold the tensor."""
        seen: set[int] = set()
        for rank in self.values:
            if rank not in seen:
                members = [each for each in self.layout.members(axes, rank) if each in self.values]
                seen.update(members)
                yield members

    def reduced(self, values: Values, axes: Sequence[str], op: str) -> Values:
        """Return values after a reduction over axes."""
        found: dict[int, torch.Tensor] = {}
        for members in self.groups(axes):
            of_group = _REDUCTIONS[op](torch.stack([values[rank] for rank in members]))
            found |= dict.fromkeys(members, of_group)
        return found

    def is_same_along(self, values: Values, axis: str) -> bool:
        """Return whether ranks that differ on an axis alone have the same."""
        return all(
            values[members[0]].shape == values[rank].shape
            and _is_close(values[rank].double(), values[members[0]].double(), self.scale)
            for members in self.groups([axis])
            for rank in members
        )

    @cached_property
    def replicated(self) -> list[str]:
        """The axes along which all ranks should hold the same."""
        return [axis for axis in self.layout.large if self._is_whole(axis) and self._has_same_region(axis)]

    @cached_property
    def cutting(self) -> list[str]:
        """The axes along which ranks hold other elements, as many of them."""
        return [
            axis for axis in self.layout.large if self._is_whole(axis) and not self._has_same_region(axis)
        ]

    def _is_whole(self, axis: str) -> bool:
        """Return whether all ranks along an axis hold the tensor, in parts of one shape."""
        groups = list(self.groups([axis]))
        shapes = [{self.regions[rank].shape for rank in members} for members in groups]
        return all(len(members) == self.layout[axis] for members in groups) and all(
            len(each) == 1 for each in shapes
        )

    def _has_same_region(self, axis: str) -> bool:
        return all(
            torch.equal(self.regions[rank], self.regions[members[0]])
            for members in self.groups([axis])
            for rank in members
        )

    # Hypotheses

    def explain(self) -> str:
        """Return what is wrong with it as one change, "" if no single one explains it."""
        if infinite := [rank for rank, value in self.values.items() if not bool(torch.isfinite(value).all())]:
            return f"is not finite on {ranks(infinite)}"
        if all(not bool(value.any()) for value in self.values.values()):
            return "is zero on all ranks"
        hypotheses = (
            (self._unmoved, self._reordered)
            if self.kind == "parameter"
            else (
                *(self._unreduced, self._scaled, self._unreduced_and_scaled),
                *(self._reduced_over_parts, self._left_in, self._reordered),
            )
        )
        return next((found for hypothesis in hypotheses if (found := hypothesis())), "")

    def _unreduced(self) -> str:
        axes = [axis for axis in self.replicated if not self.is_same_along(self.values, axis)]
        for number in range(1, len(axes) + 1):
            found = [
                (op, over)
                for over in combinations(axes, number)
                for op in _REDUCTIONS
                if self.equals(self.reduced(self.values, over, op))
            ]
            if found:
                ops = [f"a {op} over {' and '.join(over)}" for op, over in found]
                return f"equals the reference after {either(ops)}: that reduction is missing"
        return ""

    def _scaled(self) -> str:
        factor = self.factor(self.values)
        return "" if factor is None else f"is {self.describe_factor(factor)}"

    def _unreduced_and_scaled(self) -> str:
        axes = [axis for axis in self.replicated if not self.is_same_along(self.values, axis)]
        for number in range(1, len(axes) + 1):
            for over in combinations(axes, number):
                factor = self.factor(self.reduced(self.values, over, "sum"))
                if factor is not None:
                    after = f"after a sum over {' and '.join(over)}, which is missing, it"
                    return f"is wrong twice: {after} is {self.describe_factor(factor)}"
        return ""

    def _reduced_over_parts(self) -> str:
        for number in range(1, len(self.cutting) + 1):
            for over in combinations(self.cutting, number):
                for op in ("sum", "mean"):
                    if self.equals(self.values, self.reduced(self.expected, over, op)):
                        axes = " and ".join(over)
                        return f"is the {op} of the parts of all ranks of {axes}: reduced over what cuts it"
        return ""

    def _left_in(self) -> str:
        total = self.whole.clone()
        for back, gradient in enumerate(self.earlier, 1):
            total += gradient
            steps = "that of the step before" if back == 1 else f"those of the {back} steps before"
            if self.equals(self.values, self.parts_of(total)):
                return f"is the reference plus {steps}: left in, not zeroed"
            if back == 1 and self.equals(self.values, self.parts_of(gradient)):
                return "is that of the step before"
        return ""

    def _unmoved(self) -> str:
        if self.earlier and self.equals(self.values, self.parts_of(self.earlier[0])):
            return "did not move in this step: no optimizer has it"
        return ""

    def _reordered(self) -> str:
        if self.assembled is None or not self.whole.dim():
            return ""
        for dim in range(self.whole.dim()):
            mine, theirs = (
                each.movedim(dim, 0).flatten(1) if each.dim() > 1 else each[:, None]
                for each in (self.assembled, self.whole)
            )
            if len(mine) > 1 and _is_close(_sorted(mine), _sorted(theirs), self.scale):
                order = f"has the reference's values along dim {dim} in another order"
                return f"{order}: a packed weight cut whole, perhaps"
        return ""

    def right_at(self) -> str:
        """Return the one coordinate at which it is right, or wrong, where replicas differ."""
        right = {
            rank for rank, value in self.values.items() if _is_close(value, self.expected[rank], self.scale)
        }
        for axis in self.replicated:
            places = {rank: self.layout.at(axis, rank) for rank in self.values}
            good, bad = (
                {places[rank] for rank in right},
                {places[rank] for rank in places if rank not in right},
            )
            if good and bad and not good & bad:
                where = (
                    f"right at {axis} {min(good)} alone"
                    if len(good) == 1
                    else f"wrong at {axis} {listed(bad)}"
                )
                return f"is {where}: replicas differ"
        held_right = [self.regions[rank] for rank in right]
        if right and all(
            any(torch.equal(each, mine) for mine in held_right) for each in self.regions.values()
        ):
            return f"is right on {ranks(sorted(right))} alone: replicas differ"
        return ""

    def factor(self, values: Values) -> float | None:
        """Return the one factor by which values are the reference's; None if there is none, or it is 1."""
        expected = torch.cat([self.expected[rank].reshape(-1) for rank in values])
        actual = torch.cat([value.reshape(-1) for value in values.values()])
        if self.whole.numel() < 2:  # any number is a factor of another
            return None
        factor = float(actual @ expected / (expected @ expected))
        is_one = abs(factor - 1) < CLOSE
        return (
            factor
            if not is_one and _is_close(actual, factor * expected, self.scale * max(1, abs(factor)))
            else None
        )

    def describe_factor(self, factor: float) -> str:
        """Return the factor with the sizes that it may come from."""
        return describe_factor(
            factor, {axis: self.layout[axis] for axis in self.layout.large}, self.microbatches
        )


def describe_factor(factor: float, sizes: Mapping[str, int], microbatches: int) -> str:
    """Return "2 times the reference: multiplied by dp or tp (2)", say."""
    known = {**sizes, **({"the number of microbatches": microbatches} if microbatches > 1 else {})}
    for inverse, verb in ((False, "multiplied"), (True, "divided")):
        wanted = 1 / factor if inverse and factor else factor
        for number in range(1, len(known) + 1):
            found = [
                " and ".join(names)
                for names in combinations(known, number)
                if abs(math.prod(known[name] for name in names) - wanted) < CLOSE * abs(wanted)
            ]
            if found and (inverse or wanted > 1):
                times = f"1/{wanted:.4g} of" if inverse else f"{wanted:.4g} times"
                return f"{times} the reference: {verb} by {either(found)} ({wanted:.4g}) once too often"
    if abs(factor - 1) < 1e-6:
        return f"1 {factor - 1:+.1e} times the reference: float32 somewhere, perhaps"
    return f"{factor:.6g} times the reference"


def either(texts: Sequence[str]) -> str:
    return ", or ".join(texts)


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(each) for each in sorted(numbers))


def ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _is_close(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> bool:
    if actual.shape != expected.shape:
        return False
    return not actual.numel() or float((actual - expected).abs().max()) <= CLOSE * scale


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in an order that depends on their values alone."""
    weights = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=rows.dtype) + 0.5
    return rows[(rows @ weights).argsort()]
