"""Wrong gradients and losses that are another sum of the same blocks of a batch. Imports torch.

The gradients of the unsharded model on blocks of the batch, fitted to a wrong gradient, say how often each
counts: a lost microbatch has the weight 0, a mean of means other weights than the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.layouts.reference import Blocks, fit
from lockstep.layouts.suspect import CLOSE, describe_factor, listed


@dataclass(frozen=True)
class Counting:
    """One way to number the blocks of a batch: by microbatch, by data part, or by sequence part.

    Attributes:
        what: the word for one of them, such as "microbatch".
        labels: the number of each block.
    """

    what: str
    count: int
    labels: torch.Tensor


@dataclass(frozen=True)
class Weighing:
    """The blocks of a batch, and the ways in which ranks and microbatches share them.

    Attributes:
        data_axes: the axes over which rows are cut, and their sizes.
    """

    blocks: Blocks
    data_axes: Mapping[str, int]
    microbatches: int

    def countings(self) -> Iterator[Counting]:
        """Yield the ways to number blocks: ranks cut rows first, or microbatches do."""
        blocks, micro = self.blocks, self.microbatches
        data = blocks.rows // micro
        row = torch.arange(blocks.rows * blocks.sequence) // blocks.sequence
        name = f"{next(iter(self.data_axes))} part" if len(self.data_axes) == 1 else "data part"
        if micro > 1:
            yield Counting("microbatch", micro, row % micro)
            if data > 1:
                yield Counting("microbatch", micro, row // data)
        if data > 1:
            yield Counting(name, data, row // micro)
            if micro > 1:
                yield Counting(name, data, row % data)
        place = torch.arange(len(row)) % blocks.sequence
        if data > 1 and blocks.sequence > 1:
            for of_row in (row // micro, row % data) if micro > 1 else (row,):
                labels = of_row * blocks.sequence + place
                yield Counting("row and sequence part", data * blocks.sequence, labels)
        if blocks.sequence > 1:
            yield Counting("sequence part", blocks.sequence, place)

    def explain(self, gradients: Mapping[str, torch.Tensor]) -> str:
        """Return by which weights of blocks wrong gradients are explained, "" if by none that has a name."""
        blocks = self.blocks
        if blocks.weights is None or len(blocks.weights) < 2:
            return ""
        found = fit({name: blocks.gradients[name] for name in gradients}, gradients)
        if found is None:
            return ""
        number = blocks.rows * blocks.sequence
        of_terms = self._explain_terms(found[number:] / blocks.weights[number:])
        ratios = found[:number] / blocks.weights[:number]
        if _are(ratios, 1.0):
            return of_terms
        if number < len(found) and not _are(found[number:] / blocks.weights[number:], 1.0):
            return ""  # two things are wrong
        return self._explain_blocks(found[:number], ratios)

    def _explain_terms(self, ratios: torch.Tensor) -> str:
        off = [place for place, ratio in enumerate(ratios.tolist()) if abs(ratio - 1) > CLOSE]
        if len(off) != 1:
            return ""
        term, ratio = self.blocks.terms[off[0]], float(ratios[off[0]])
        if abs(ratio) < CLOSE:
            return f"lacks the term `{term}` of the loss"
        times = describe_factor(ratio, self.data_axes, self.microbatches)
        return f"has the term `{term}` of the loss as {times}"

    def _explain_blocks(self, weights: torch.Tensor, ratios: torch.Tensor) -> str:
        for counting in self.countings():
            of_labels = [ratios[counting.labels == each] for each in range(counting.count)]
            known = {label: of for label, each in enumerate(of_labels) if len(of := each[~each.isnan()])}
            if not all(_are(each, float(each[0])) for each in known.values()):
                continue
            values = {label: float(each[0]) for label, each in known.items()}
            if found := _describe_counts(values, counting):
                return found
        return next((found for each in self.countings() if (found := self._mean_of_means(weights, each))), "")

    def _mean_of_means(self, weights: torch.Tensor, counting: Counting) -> str:
        """Return that each part counts as much as any other, where their tokens say otherwise."""
        assert self.blocks.weights is not None, "a fit of the whole batch"
        right = self.blocks.weights[: len(weights)].nan_to_num()
        total = torch.zeros(counting.count, dtype=right.dtype).index_add(0, counting.labels, right)
        alive = int((total.abs() > CLOSE).sum())
        means = right / total.where(total != 0, 1.0)[counting.labels]
        for count in {alive, counting.count}:
            if alive > 1 and _are(weights.nan_to_num() - means / count, 0.0):
                return (
                    f"is a mean of the means of each {counting.what}: they count alike, though their tokens "
                    "are not as many"
                )
        return ""

    def explain_loss(self, loss: float) -> str:
        """Return which mean of means a wrong loss is, "" if it is none."""
        if self.blocks.weights is None:
            return ""
        right = self.blocks.weights[: self.blocks.rows * self.blocks.sequence].nan_to_num()
        losses = torch.tensor(self.blocks.losses, dtype=right.dtype).nan_to_num()
        for counting in self.countings():
            total = torch.zeros(counting.count, dtype=right.dtype).index_add(0, counting.labels, right)
            sums = torch.zeros_like(total).index_add(0, counting.labels, right * losses)
            alive = total.abs() > CLOSE
            if int(alive.sum()) > 1:
                mean = float((sums[alive] / total[alive]).mean())
                if abs(mean - loss) <= CLOSE * abs(loss):
                    return f"is a mean of the means of each {counting.what}"
        return ""


def _describe_counts(values: Mapping[int, float], counting: Counting) -> str:
    """Return which parts are lost, or count several times, where the others count once."""
    off = {label: value for label, value in values.items() if abs(value - 1) > CLOSE}
    if not 0 < len(off) < len(values):
        return ""
    what = (
        counting.what if len(off) == 1 else f"{counting.what}{'es' if counting.what.endswith('h') else 's'}"
    )
    (first, *others) = off.values()
    if any(abs(each - first) > CLOSE for each in others):
        return ""
    if abs(first) < CLOSE:
        return f"lacks {what} {listed(off)} of {counting.count}"
    return f"counts {what} {listed(off)} of {counting.count} {first:.4g} times"


def _are(values: Sequence[float] | torch.Tensor, wanted: float) -> bool:
    """Return whether all values that are known are the one that is wanted."""
    found = torch.as_tensor(values)
    found = found[~found.isnan()]
    return not len(found) or float((found - wanted).abs().max()) <= 1e-7 * max(1.0, abs(wanted))
