"""One wrong tensor as all ranks hold it, and the single changes that would explain it. Imports torch.

A hypothesis that does not hold on all ranks says nothing, and those that hold alike are all said: rather
none than a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import torch

from lockstep.layouts.factors import CLOSE, describe_factor, is_product, listed, products, ranks
from lockstep.layouts.layout import Layout
from lockstep.layouts.shards import PADDING, take
from lockstep.recorders.tensors import short

Values = Mapping[int, torch.Tensor]
"""A tensor by rank."""

Hypothesis = Callable[[], Iterator[str]]

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
        """The axes along which the ranks that hold it, at least two, should hold the same."""
        return [
            axis
            for axis in self.layout.large
            if all(len(members) > 1 for members in self.groups([axis])) and self._has_same_region(axis)
        ]

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

    # Hypotheses: each yields the sentences that hold on all ranks

    def explanations(self) -> list[str]:
        """Return the single changes that explain it: all of the first kind of which one does."""
        if infinite := [rank for rank, value in self.values.items() if not bool(torch.isfinite(value).all())]:
            return [f"is not finite on {ranks(infinite)}"]
        if all(not bool(value.any()) for value in self.values.values()):
            return ["is zero on all ranks"]
        single = (self._scaled, self._scaled_by_rank, self._right_at, self._other_part, self._rounded)
        if self.kind == "parameter":
            kinds: tuple[tuple[Hypothesis, ...], ...] = ((*single, self._moved), (self._reordered,))
        else:
            reduced = (self._unreduced, self._unshared, self._reduced_over_parts, self._reduced_over_others)
            of_gradient = (*reduced, self._left_in)
            kinds = ((*of_gradient, *single), (self._unreduced_and_scaled, self._reordered))
        for kind in kinds:
            if found := [text for hypothesis in kind for text in hypothesis()]:
                return list(dict.fromkeys(found))
        return []

    @cached_property
    def _differing(self) -> list[str]:
        """The axes along which replicas differ."""
        return [axis for axis in self.replicated if not self.is_same_along(self.values, axis)]

    def _reductions(self) -> Iterator[tuple[dict[str, str], Values]]:
        """Yield reductions by axis, of those along which replicas differ, those over few axes first."""
        for number in range(1, len(self._differing) + 1):
            for over in combinations(self._differing, number):
                for op in _REDUCTIONS:
                    yield dict.fromkeys(over, op), self.reduced(self.values, over, op)
                for ops in product(("sum", "mean"), repeat=number):
                    if len(set(ops)) > 1:
                        values = self.values
                        for axis, op in zip(over, ops, strict=True):
                            values = self.reduced(values, [axis], op)
                        yield dict(zip(over, ops, strict=True)), values

    def _unreduced(self) -> Iterator[str]:
        for ops, values in self._reductions():
            if self.equals(values):
                yield f"equals the reference after {_in_words(ops)}: that reduction is missing"
                # A size of something else may have divided it, or not: the numbers are the same.
                if {*ops.values()} == {"mean"}:
                    over = " and ".join(ops)
                    size = math.prod(self.layout[axis] for axis in ops)
                    if products(size, self._sizes, self.microbatches) != [over]:
                        factor = self.describe_factor(size)
                        yield f"is wrong twice: after a sum over {over}, which is missing, it is {factor}"

    def _unshared(self) -> Iterator[str]:
        """Yield sums over some ranks of an axis, which share a part: heads that are fewer than ranks."""
        for axis in self.layout.large:
            sharing = {
                rank: [each for each in members if torch.equal(self.regions[each], self.regions[rank])]
                for members in self.groups([axis])
                for rank in members
            }
            if axis in self.replicated or max(map(len, sharing.values())) == 1:
                continue
            sums = {
                rank: torch.stack([self.values[each] for each in of]).sum(0) for rank, of in sharing.items()
            }
            if self.equals(sums):
                over = f"the ranks of {axis} that hold the same part"
                yield f"equals the reference after a sum over {over}: that reduction is missing"

    def _scaled(self) -> Iterator[str]:
        if (factor := self.factor(self.values)) is not None:
            yield f"is {self.describe_factor(factor)}"

    @cached_property
    def _factors(self) -> Mapping[int, float]:
        """The factor of each rank; empty where one has none, or has nothing but zeros to compare."""
        found = {}
        for rank, value in self.values.items():
            if _is_close(value, self.expected[rank], self.scale):
                found[rank] = 1.0
            elif not bool(value.any()):
                found[rank] = 0.0
            elif bool(self.expected[rank].any()) and (factor := self.factor({rank: value})) is not None:
                found[rank] = factor
            else:
                return {}
        return found

    def _scaled_by_rank(self) -> Iterator[str]:
        factors = self._factors
        if not factors or all(each in (0.0, 1.0) for each in factors.values()):
            return
        by_factor: dict[str, list[int]] = {}
        for rank, factor in factors.items():
            by_factor.setdefault(f"{factor:.6g}", []).append(rank)
        if len(by_factor) > 1:
            by_factor.pop("1", None)
            several = (f"{factor} times the reference on {ranks(of)}" for factor, of in by_factor.items())
            yield f"is {', '.join(several)}"

    def _unreduced_and_scaled(self) -> Iterator[str]:
        if self._factors:  # any sum of them is the reference times something
            return
        for ops, values in self._reductions():
            if "mean" not in ops.values() and (factor := self.factor(values)) is not None:
                what = _in_words(ops)
                yield f"is wrong twice: after {what}, which is missing, it is {self.describe_factor(factor)}"
                return

    def _reduced_over_parts(self) -> Iterator[str]:
        for number in range(1, len(self.cutting) + 1):
            for over in combinations(self.cutting, number):
                for op in ("sum", "mean"):
                    if self.equals(self.values, self.reduced(self.expected, over, op)):
                        axes = " and ".join(over)
                        yield f"is the {op} of the parts of all ranks of {axes}: reduced over what cuts it"

    def _reduced_over_others(self) -> Iterator[str]:
        """Yield the axes of a wrong group: one that cuts it, in place of one along which replicas differ."""
        for lacking, cutting in product(self._differing, self.cutting):
            expected = self.reduced(self.expected, [cutting], "sum")
            if self.equals(self.reduced(self.values, [lacking], "sum"), expected):
                yield f"is summed over {cutting}, which cuts it, in place of {lacking}"

    def _rounded(self) -> Iterator[str]:
        """Yield the dtype of which all values are, where the right ones have more digits."""
        actual, expected = (
            torch.cat([each[rank].reshape(-1) for rank in self.values])
            for each in (self.values, self.expected)
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            allowed = torch.finfo(dtype).eps * self.scale
            if (
                len(actual) > 3
                and torch.equal(actual, actual.to(dtype).double())
                and not torch.equal(expected, expected.to(dtype).double())
                and float((actual - expected).abs().max()) <= allowed
            ):
                yield f"is the reference rounded to {short(dtype)}"
                return

    def _left_in(self) -> Iterator[str]:
        total = torch.zeros_like(self.whole)
        for back, gradient in enumerate(self.earlier, 1):
            total += gradient
            steps = "that of the step before" if back == 1 else f"those of the {back} steps before"
            added = {rank: value - self.expected[rank] for rank, value in self.values.items()}
            left = replace(self, whole=total.clone())
            factor = 1.0 if left.equals(added) else left.factor(added)
            if factor is not None and is_product(factor, self._sizes, self.microbatches):
                times = "" if factor == 1 else f"{factor:.6g} times "
                yield f"is the reference plus {times}{steps}: left in, not zeroed"
                return
            if back == 1 and self.equals(self.values, self.parts_of(gradient)):
                yield "is that of the step before"

    def _moved(self) -> Iterator[str]:
        if not self.earlier:
            return
        before = self.parts_of(self.earlier[0])
        moved = {rank: value - before[rank] for rank, value in self.values.items()}
        if self.equals(self.values, before):
            yield "did not move in this step: no optimizer has it"
        elif (factor := replace(self, whole=self.whole - self.earlier[0]).factor(moved)) is not None:
            yield f"moved as far as {self.describe_factor(factor)}"

    def _other_part(self) -> Iterator[str]:
        for axis in self.cutting:
            places: dict[int, list[int]] = {}
            for rank, value in self.values.items():
                for other in self.layout.members([axis], rank):
                    if _is_close(value, self.expected[other], self.scale):
                        places.setdefault(rank, []).append(self.layout.at(axis, other))
            if len(places) < len(self.values):
                continue
            if same := set.intersection(*(set(each) for each in places.values())):
                yield f"is the part of {axis} {min(same)} on all ranks of {axis}"
            else:
                yield f"is the part of another rank of {axis}"

    def _reordered(self) -> Iterator[str]:
        if self.assembled is None or not self.whole.dim():
            return
        for dim in range(self.whole.dim()):
            mine, theirs = (
                each.movedim(dim, 0).flatten(1) if each.dim() > 1 else each[:, None]
                for each in (self.assembled, self.whole)
            )
            if len(mine) > 1 and _is_close(_sorted(mine), _sorted(theirs), self.scale):
                order = f"has the reference's values along dim {dim} in another order"
                yield f"{order}: a packed weight cut whole, perhaps"

    def _right_at(self) -> Iterator[str]:
        """Yield the one coordinate at which it is right, or wrong, where replicas differ."""
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
                yield f"is {where}: replicas differ"
                return
        held_right = [self.regions[rank] for rank in right]
        if right and all(
            any(torch.equal(each, mine) for mine in held_right) for each in self.regions.values()
        ):
            yield f"is right on {ranks(sorted(right))} alone: replicas differ"

    def factor(self, values: Values) -> float | None:
        """Return the one factor by which values are the reference's; None if there is none, or it is 1.

        Any number is a factor of another: of one element, however many ranks hold it, only a product of
        sizes counts.
        """
        expected = torch.cat([self.expected[rank].reshape(-1) for rank in values])
        actual = torch.cat([value.reshape(-1) for value in values.values()])
        if not bool(expected.any()):
            return None
        factor = float(actual @ expected / (expected @ expected))
        elements = torch.cat([self.regions[rank].reshape(-1) for rank in values])
        elements = elements[elements != PADDING]
        is_single = bool((elements == elements[0]).all())
        if is_single and not is_product(factor, self._sizes, self.microbatches):
            return None
        is_one = abs(factor - 1) < CLOSE
        return (
            factor
            if not is_one and _is_close(actual, factor * expected, self.scale * max(1, abs(factor)))
            else None
        )

    def describe_factor(self, factor: float) -> str:
        """Return the factor with the sizes that it may come from."""
        return describe_factor(factor, self._sizes, self.microbatches)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {axis: self.layout[axis] for axis in self.layout.large}


def _in_words(ops: Mapping[str, str]) -> str:
    """Return reductions by axis as "a sum over dp and tp", or "a mean over dp and a sum over tp"."""
    if len({*ops.values()}) == 1:
        return f"a {next(iter(ops.values()))} over {' and '.join(ops)}"
    return " and ".join(f"a {op} over {axis}" for axis, op in ops.items())


def _is_close(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> bool:
    if actual.shape != expected.shape:
        return False
    return not actual.numel() or float((actual - expected).abs().max()) <= CLOSE * scale


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in an order that depends on their values alone."""
    weights = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=rows.dtype) + 0.5
    return rows[(rows @ weights).argsort()]
