"""Batches that tell ranks apart, their parts, and the refusal of those under which bugs go unseen.

Inside a rank; imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from lockstep.layouts.layout import chunk
from lockstep.recorders.tensors import named_tensors

__tracebackhide__ = True

Batch = Any
"""A tensor, or a mapping of tensors; those as long as the first along dim 0 have a row for each sequence."""
KeepPart = Callable[[Batch, int, int], Batch]
"""Returns a batch of which only sequence part `index` of `count` counts in the loss."""


def witness_batches(
    vocab: int, sequences: int = 24, tokens: int = 16, steps: int = 3, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Return batches of language modelling under which wrong reductions are seen.

    Neighbours have unequal numbers of valid tokens, some sequences and some parts of a batch have none, and
    the valid tokens of the last batch all lie in its second eighth.

    Args:
        sequences: rows of a batch: a multiple of 24 can be cut into 8 parts of 3 microbatches.

    Returns:
        For each step `tokens` and `labels`, int64 of the shape (sequences, tokens); labels are -100 where
        there is nothing to predict.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(steps):
        ids = torch.randint(vocab, (sequences, tokens + 1), generator=generator)
        valid = (torch.arange(sequences) * 5 + 3 * step) % (tokens - 1) + 2
        rows = torch.arange(sequences)
        valid[rows % 7 == 3] = 0
        if step == steps - 1 and steps > 1:
            valid[(rows * 8 // sequences) != 1] = 0
            valid[sequences // 8] = tokens
        elif step:
            valid[rows * 8 // sequences == 2 + step % 5] = 0
        labels = ids[:, 1:].where(torch.arange(tokens) < valid[:, None], -100)
        batches.append({"tokens": ids[:, :-1].contiguous(), "labels": labels})
    return batches


def keep_labels(batch: Mapping[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    """Return a batch of `tokens` and `labels` of which only one sequence part is predicted: a `KeepPart`."""
    labels = torch.full_like(batch["labels"], -100)
    chunk(labels, index, count, 1).copy_(chunk(batch["labels"], index, count, 1))
    return {**batch, "labels": labels}


def rows_of(batch: Batch) -> int:
    """Return how many rows a batch has."""
    tensors = [each for each in named_tensors(batch).values() if each.dim()]
    return tensors[0].shape[0] if tensors else 0


def part_of(batch: Batch, index: int, count: int) -> Batch:
    """Return part `index` of `count` of a batch's rows, as `torch.chunk` cuts."""
    rows = rows_of(batch)
    if isinstance(batch, torch.Tensor):
        return chunk(batch, index, count)
    return {
        name: chunk(each, index, count)
        if isinstance(each, torch.Tensor) and each.dim() and each.shape[0] == rows
        else each
        for name, each in batch.items()
    }


def refuse(batches: Sequence[Batch], microbatches: Sequence[int], data: int) -> None:
    """Refuse batches under which a wrong reduction could look right.

    Args:
        data: how many parts a batch's rows have at least on different ranks.

    Raises:
        ValueError: with the batch, and the remedy.
    """
    if len(batches) < 2:
        raise ValueError(
            "one batch: a gradient left in from the step before would go unseen; give two or more"
        )
    if len(microbatches) != len(batches):
        raise ValueError(
            f"microbatches={tuple(microbatches)} for {len(batches)} batches: give one number for each"
        )
    for step, (batch, micro) in enumerate(zip(batches, microbatches, strict=True)):
        if not (isinstance(batch, torch.Tensor | Mapping)) or not rows_of(batch):
            raise ValueError(
                f"batch {step} is {type(batch).__name__}: give a tensor, or a mapping of tensors"
            )
        if rows_of(batch) < data * micro:
            raise ValueError(
                f"batch {step} has {rows_of(batch)} rows: too few for {data} parts of {micro} microbatches"
            )
        of_ranks = (part_of(batch, index, data) for index in range(data))
        cut = (part_of(each, index, micro) for each in of_ranks for index in range(micro))
        parts = [each for each in cut if rows_of(each)]  # the last ones are empty where rows do not divide
        for first, second in combinations(range(len(parts)), 2):
            if _is_alike(parts[first], parts[second]):
                raise ValueError(
                    f"parts {first} and {second} of {len(parts)} of batch {step} are alike: a rank that "
                    "reads the other's would go unseen; give each sequence its own data"
                )
    for first, second in combinations(range(len(batches)), 2):
        if _is_alike(batches[first], batches[second]):
            raise ValueError(f"batches {first} and {second} are alike: give each step its own data")


def _is_alike(first: Batch, second: Batch) -> bool:
    theirs = named_tensors(second)
    mine = {name: each for name, each in named_tensors(first).items() if name in theirs and each.dim()}
    return all(torch.equal(each, theirs[name]) for name, each in mine.items())
