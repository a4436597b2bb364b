"""The tensors of a rank at one moment, and their comparison with the unsharded ones. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lockstep.layouts.reference import Reference, Step, Tensors
from lockstep.layouts.shards import take

TOLERANCE = 1e-12
"""Part of a tensor's largest value. Sums in another order were off by 4e-15 at most in 200 right layouts."""


def is_wrong(actual: float, expected: float) -> bool:
    """Return whether a number differs by more than the tolerance, or is nan."""
    return not abs(actual - expected) <= TOLERANCE * max(abs(expected), 1e-300)


@dataclass(frozen=True)
class Held:
    """A tensor that a rank holds.

    Attributes:
        name: the unsharded model's.
        own: this rank's.
        region: elements of the unsharded tensor, as indices into it flattened.
        value: None where a gradient is missing.
    """

    name: str
    own: str
    region: torch.Tensor
    value: torch.Tensor | None

    def expected(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of the unsharded tensor that this one should equal."""
        return take(whole, self.region)

    def error(self, whole: torch.Tensor) -> float:
        """Return the largest difference from the unsharded tensor's part, 0 if within the tolerance."""
        if self.value is None or not self.value.numel():
            return 0.0
        worst = float((self.value - self.expected(whole)).abs().max())
        return 0.0 if worst <= TOLERANCE * float(whole.abs().max()) else worst

    def complaint(self, whole: torch.Tensor, kind: str) -> str:
        """Return why it cannot be compared, "" where it can."""
        if self.value is None:
            is_zero = not bool(self.expected(whole).any())
            return (
                "" if is_zero else f"{kind} of `{self.own}` is None, and that of the unsharded model is not"
            )
        if self.value.shape != self.region.shape:
            return (
                f"{kind} `{self.own}` has the shape {list(self.value.shape)}, its part of the unsharded "
                f"{list(whole.shape)} is {list(self.region.shape)}: the shard map has another cut"
            )
        return ""


@dataclass
class Moment:
    """All that a rank holds at one moment: parameters before or after a step, gradients in it."""

    step: int
    title: str
    kind: str
    held: list[Held] = field(default_factory=list)
    loss: float | None = None
    norm: float | None = None
    complaints: list[str] = field(default_factory=list)

    def whole(self, reference: Reference) -> Tensors:
        """Return the unsharded tensors of this moment."""
        return self.of_step(reference.steps[self.step])

    def of_step(self, step: Step) -> Tensors:
        """Return the tensors of this moment in a step."""
        if self.kind == "gradient":
            return step.gradients
        return step.before if self.title.startswith("before") else step.after

    def with_expected(self, reference: Reference) -> Iterator[tuple[Held, torch.Tensor]]:
        """Yield each tensor with the unsharded one that it is a part of."""
        wholes = self.whole(reference)
        return ((each, wholes[each.name]) for each in self.held)
