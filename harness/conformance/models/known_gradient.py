"""Weights whose gradient is known to the bit. Imports torch only."""

from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["KnownGradient", "KnownGradients"]


class KnownGradient(nn.Module):
    """One weight, at first zero, whose gradient is what forward is given: every bit of a reduction shows."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a 0-dim loss; ``gradient`` is broadcast to the weight's shape."""
        return (self.weight * gradient).sum()


class KnownGradients(nn.Sequential):
    """Four such weights of ``num`` elements with the same gradient: the first and the last are the root's."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("1", "2")

    def __init__(self, num: int) -> None:
        super().__init__(*(KnownGradient(num) for _ in range(4)))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a 0-dim loss."""
        return torch.stack([module(gradient) for module in self]).sum()
