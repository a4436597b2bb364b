"""The masks of dropout on the ranks of a layout. Inside a rank; calls torch.distributed.

Masks drawn on ranks are not those of the unsharded model, so that they are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.assertions.agreement import gathered
from lockstep.layouts.batches import Batch
from lockstep.layouts.factors import CLOSE
from lockstep.layouts.layout import Layout
from lockstep.layouts.oracle import trainer_of
from lockstep.layouts.reference import Loss
from lockstep.recorders.tensors import local_part

_CHANCE = math.log(1e-9)
"""Log of the probability below which masks are not equal by chance."""


@dataclass(frozen=True)
class _Call:
    """One call of dropout: its input, what it dropped, and the probability."""

    given: torch.Tensor
    dropped: torch.Tensor
    p: float

    def is_alike(self, other: _Call) -> bool:
        """Return whether two calls had the same input."""
        return float((self.given - other.given).abs().max()) <= CLOSE * float(self.given.abs().max())

    def has_mask_of(self, other: _Call) -> bool:
        """Return whether two calls dropped the same elements of those that are not zero in both."""
        known = (self.given != 0) & (other.given != 0)
        return torch.equal(self.dropped[known], other.dropped[known])

    def may_differ(self, other: _Call) -> bool:
        """Return whether masks drawn apart would differ, but for a chance of 1e-9."""
        known = int(((self.given != 0) & (other.given != 0)).sum())
        return known * math.log(self.p**2 + (1 - self.p) ** 2) < _CHANCE


class _Recorder(TorchFunctionMode):
    """Records the calls of `torch.nn.functional.dropout`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        named: dict[str, Any] = {"p": 0.5, "training": True}
        named |= dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | (kwargs or {})
        given = local_part(named["input"].detach()).clone()
        output = func(*args, **(kwargs or {}))
        if named["training"] and 0 < named["p"] < 1 and given.numel():
            dropped = (local_part(output.detach()) == 0) & (given != 0)
            self.calls.append(_Call(given.cpu(), dropped.cpu(), named["p"]))
        return output


def assert_dropout_follows_inputs(
    layout: Layout,
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, Layout], Any],
    batch: Batch,
    loss: Loss,
) -> None:
    """Assert that ranks drop the same elements of equal inputs, and others of others.

    Every rank must call it. Compared is the n-th call of `torch.nn.functional.dropout` of each pair of ranks,
    where their inputs have one shape; dropout inside of other functions, such as
    `scaled_dot_product_attention`, is not seen.

    Args:
        layout: the fixture `layout`.
        build: returns the unsharded model, with dropout.
        parallelize: as of `assert_same_as_unsharded`.
        batch: run once, in one microbatch.
        loss: of the model on a batch, for a bare module.

    Raises:
        AssertionError: on every rank, with the first call and the axes on which two ranks differ.
        ValueError: no rank called dropout.
    """
    __tracebackhide__ = True
    trainer = trainer_of(parallelize(build(), layout), loss, layout)
    with _Recorder() as recorder:
        trainer(batch, 1)
    calls: Mapping[int, list[_Call]] = gathered(recorder.calls)
    if not any(calls.values()):
        raise ValueError(
            "no rank called torch.nn.functional.dropout in training, with p between 0 and 1: there is "
            "nothing to compare"
        )
    if wrong := next(_wrong(calls, layout), ""):
        raise AssertionError(f"{layout.name}: {wrong}")


def _wrong(calls: Mapping[int, list[_Call]], layout: Layout) -> Iterator[str]:
    def apart(ranks: tuple[int, int]) -> list[str]:
        return [axis for axis in layout.large if layout.at(axis, ranks[0]) != layout.at(axis, ranks[1])]

    # Ranks that differ on one axis alone say most.
    pairs = sorted(combinations(calls, 2), key=lambda ranks: len(apart(ranks)))
    for number in range(max(map(len, calls.values()))):
        for first, second in pairs:
            if number >= min(len(calls[first]), len(calls[second])):
                continue
            one, other = calls[first][number], calls[second][number]
            if one.given.shape != other.given.shape or not one.may_differ(other):
                continue
            axes = " and ".join(apart((first, second)))
            call = f"call {number} of dropout ({list(one.given.shape)})"
            where = f"{call}: ranks {first} and {second}, apart on {axes},"
            if one.is_alike(other) and not one.has_mask_of(other):
                yield f"{where} drop other elements of equal inputs: replicas diverge"
            if not one.is_alike(other) and one.has_mask_of(other):
                yield f"{where} drop the same elements of other inputs: they draw from one seed"
