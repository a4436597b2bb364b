"""Wrong gradients and losses that are another sum of the same blocks of a batch. Imports torch.

The gradients of the unsharded model on blocks of the batch, fitted to a wrong gradient, say how often each
counts: a lost microbatch has the weight 0, a mean of means other weights than the mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import torch

from lockstep.layouts.factors import CLOSE, describe_factor, listed
from lockstep.layouts.reference import Blocks, fit

_MOST = 3
"""The number of parts that a report lists by two words."""
_MOST_PARTS = 6
"""The largest number of parts of which each subset is taken from a wrong loss."""


@dataclass(frozen=True)
class Counting:
    """One way to number the blocks of a batch: by microbatch, say, or by dp part and sequence part.

    Attributes:
        sizes: how many there are of each, by the word for one of them.
        labels: the number of each block; the last word counts first.
    """

    sizes: Mapping[str, int]
    labels: torch.Tensor

    @property
    def what(self) -> str:
        return " and ".join(self.sizes)

    @property
    def count(self) -> int:
        return math.prod(self.sizes.values())

    def describe(self, labels: Sequence[int]) -> str:
        """Return "microbatches 0, 1 of 3", or "dp part 0 with sequence part 1", say."""
        if len(self.sizes) == 1:
            plural = "" if len(labels) == 1 else "es" if self.what.endswith("h") else "s"
            return f"{self.what}{plural} {listed(labels)} of {self.count}"
        texts = []
        for label in labels[:_MOST]:
            places, rest = [], label
            for word, size in reversed(list(self.sizes.items())):
                places.append(f"{word} {rest % size}")
                rest //= size
            texts.append(" with ".join(reversed(places)))
        return ", ".join(texts) + (f" and {len(labels) - _MOST} more" if len(labels) > _MOST else "")


@dataclass(frozen=True)
class Weighing:
    """The blocks of a batch, and the ways in which ranks and microbatches share them.

    Attributes:
        data_axes: the axes over which rows are cut, and their sizes.
        sizes: of all axes larger than 1.
    """

    blocks: Blocks
    data_axes: Mapping[str, int]
    sizes: Mapping[str, int]
    microbatches: int

    @property
    def _number(self) -> int:
        return self.blocks.rows * self.blocks.sequence

    def countings(self) -> Iterator[list[Counting]]:
        """Yield the ways to number blocks: by one word, by two, and so on.

        Rows may be cut by the axes in any order, and by microbatches before or after ranks.
        """
        data = {f"{axis} part": size for axis, size in self.data_axes.items()}
        micro = {"microbatch": self.microbatches} if self.microbatches > 1 else {}
        sequence = {"sequence part": self.blocks.sequence} if self.blocks.sequence > 1 else {}
        found: dict[int, dict[object, Counting]] = {}
        for axes in permutations(data):
            cut = {axis: data[axis] for axis in axes}
            for sizes in ({**cut, **micro, **sequence}, {**micro, **cut, **sequence}):
                shape = tuple(sizes.values()) or (1,)
                places = torch.unravel_index(torch.arange(self._number), shape)
                at = dict(zip(sizes, places, strict=False))
                for number in range(1, len(sizes) + 1):
                    for words in combinations(
                        [word for word in (*data, *sequence, *micro) if word in sizes], number
                    ):
                        labels = torch.zeros(self._number, dtype=torch.int64)
                        for word in words:
                            labels = labels * sizes[word] + at[word]
                        counting = Counting({word: sizes[word] for word in words}, labels)
                        found.setdefault(number, {}).setdefault((words, tuple(labels.tolist())), counting)
        for number in sorted(found):
            yield list(found[number].values())

    def explain(self, gradients: Mapping[str, torch.Tensor]) -> list[str]:
        """Return by which weights of blocks wrong gradients are explained: all that do so alike."""
        blocks, number = self.blocks, self._number
        # Of these tensors alone: an auxiliary loss that is no sum over blocks may not reach them.
        right = fit(blocks.gradients, {name: blocks.whole[name] for name in gradients})
        found = fit(blocks.gradients, gradients)
        if right is None or found is None or len(right) < 2:
            return []
        ratios, of_terms = torch.tensor_split(found / right, [number])
        if _are(ratios, 1.0):
            return self._explain_terms(of_terms)
        if not _are(of_terms, 1.0):
            return []  # two things are wrong
        for countings in self.countings():
            texts = [
                text
                for each in countings
                if (text := self._mean_of_means(found[:number], right[:number], each))
            ]
            counted = [each for counting in countings if (each := self._count(ratios, counting)) is not None]
            # One of two parts is lost, rather than two of four.
            fewest = min((parts for parts, _ in counted), default=0)
            if texts := [*texts, *(text for parts, text in counted if parts == fewest)]:
                return list(dict.fromkeys(texts))
        return []

    def _explain_terms(self, ratios: torch.Tensor) -> list[str]:
        off = [place for place, ratio in enumerate(ratios.tolist()) if abs(ratio - 1) > CLOSE]
        return [self._term(off[0], float(ratios[off[0]]))] if len(off) == 1 else []

    def _term(self, place: int, ratio: float) -> str:
        if abs(ratio) < CLOSE:
            return f"lacks the term `{self.blocks.terms[place]}` of the loss"
        times = describe_factor(ratio, self.sizes, self.microbatches)
        return f"has the term `{self.blocks.terms[place]}` of the loss as {times}"

    def _count(self, ratios: torch.Tensor, counting: Counting) -> tuple[int, str] | None:
        """Return how many parts are lost, or count several times where the others count once, and which."""
        values = {}
        for label in range(counting.count):
            known = (of := ratios[counting.labels == label])[~of.isnan()]
            if len(known):
                values[label] = float(known[0])
                if not _are(known, values[label]):
                    return None
        lost = [label for label, value in values.items() if abs(value) < CLOSE]
        off = [label for label, value in values.items() if abs(value - 1) > CLOSE]
        rest = [values[label] for label in values if label not in lost]
        if lost and rest and _are(rest, rest[0]):
            text = f"lacks {counting.describe(lost)}"
            if not _are(rest, 1.0):
                text += f", and counts the others {rest[0]:.4g} times"
            return len(lost), text
        if lost or not 0 < len(off) < len(values) or not _are([values[each] for each in off], values[off[0]]):
            return None
        return len(off), f"counts {counting.describe(off)} {values[off[0]]:.4g} times"

    def _mean_of_means(self, weights: torch.Tensor, right: torch.Tensor, counting: Counting) -> str:
        """Return that each part counts as much as any other, where their tokens say otherwise."""
        right = right.nan_to_num()
        total = self._sums(right, counting)
        alive = int((total.abs() > CLOSE).sum())
        means = right / total.where(total != 0, 1.0)[counting.labels]
        for count in {alive, counting.count}:
            if alive > 1 and _are(weights.nan_to_num() - means / count, 0.0):
                return (
                    f"is a mean of the means of each {counting.what}: they count alike, though their tokens "
                    "are not as many"
                )
        return ""

    def _sums(self, values: torch.Tensor, counting: Counting) -> torch.Tensor:
        """Return the sum over the blocks of each label."""
        return torch.zeros(counting.count, dtype=values.dtype).index_add(0, counting.labels, values)

    def with_terms(self, terms: Sequence[Blocks]) -> Weighing | None:
        """Return blocks to which terms add their parts of each; None where a term is no sum over blocks."""
        losses, gradients = torch.zeros(self._number, dtype=torch.float64), dict[str, torch.Tensor]()
        for of in (self.blocks, *terms):
            if of.weights is None:
                return None
            weights = of.weights[: self._number].nan_to_num()
            losses += weights * torch.tensor(of.losses[: self._number], dtype=torch.float64).nan_to_num()
            for name, each in of.gradients.items():
                parts = weights.view(-1, *[1] * (each.dim() - 1)) * each[: self._number]
                gradients[name] = gradients[name] + parts if name in gradients else parts
        blocks = replace(self.blocks, terms=(), losses=tuple(losses.tolist()), gradients=gradients)
        return replace(self, blocks=blocks)

    def loss_of(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Return the loss of which gradients are those; nan where they are no sum of those of blocks."""
        found = fit(self.blocks.gradients, gradients) if gradients else None
        losses = torch.tensor(self.blocks.losses, dtype=torch.float64).nan_to_num()
        return math.nan if found is None else float(found.nan_to_num() @ losses)

    def explain_loss(self, loss: float) -> list[str]:
        """Return by which parts a wrong loss is explained: all that do so alike."""
        if self.blocks.weights is None:
            return []
        right = self.blocks.weights[: self._number].nan_to_num()
        losses = torch.tensor(self.blocks.losses, dtype=right.dtype).nan_to_num()
        of_blocks, of_terms = right * losses[: self._number], losses[self._number :]
        whole = float(of_blocks.sum() + of_terms.sum())

        def fits(other: float) -> bool:
            return abs(other - loss) <= CLOSE * abs(loss)

        products = {
            math.prod(each)
            for n in range(1, len(self.sizes) + 1)
            for each in combinations(self.sizes.values(), n)
        }
        ratios = (0.0, *products, *(1 / each for each in products))
        for place, term in enumerate(of_terms.tolist()):
            if found := [self._term(place, ratio) for ratio in ratios if fits(whole + (ratio - 1) * term)]:
                return found
        for countings in self.countings():
            texts = []
            for counting in countings:
                total, sums = self._sums(right, counting), self._sums(of_blocks, counting)
                alive = [label for label in range(counting.count) if abs(float(total[label])) > CLOSE]
                if len(alive) > 1 and fits(float((sums / total)[alive].mean() + of_terms.sum())):
                    texts.append(f"is a mean of the means of each {counting.what}")
                for number in range(1, len(alive) if len(alive) <= _MOST_PARTS else 2):
                    for lost in combinations(alive, number):
                        if fits(whole - float(sums[list(lost)].sum())):
                            texts.append(f"lacks {counting.describe(lost)}")
            if texts:
                return list(dict.fromkeys(texts))
        return []


def _are(values: Sequence[float] | torch.Tensor, wanted: float) -> bool:
    """Return whether all values that are known are the one that is wanted."""
    found = torch.as_tensor(values)
    found = found[~found.isnan()]
    return not len(found) or float((found - wanted).abs().max()) <= 1e-7 * max(1.0, abs(wanted))
