"""Layers that meet dtypes of others: who casts, the engine or the module? Imports torch only."""

import torch
from torch import Tensor, nn

__all__ = ["CastingLayers", "ExternalInput"]


class CastingLayer(nn.Module):
    """A linear layer whose module casts the input to the weight's dtype, if told."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        output: Tensor = self.l(x.to(self.l.weight.dtype) if self.casts else x)
        return output


class CastingLayers(nn.Module):
    """Two layers, ``c1`` and ``c2``, that cast for themselves if told: their ``l`` shows what came out."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.c1, self.c2 = CastingLayer(casts), CastingLayer(casts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        output: Tensor = self.c2(self.c1(x))
        return output


class Sum(nn.Linear):
    """A linear layer that adds a second argument to its output."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # one argument more
        """Map (batch, in_features) and a tensor of the output's shape to (batch, out_features)."""
        return super().forward(x) + y


class ExternalInput(nn.Module):
    """A layer ``l2`` that is given what the layer ``l1`` made, and an fp32 tensor from nowhere beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(8, 8), Sum(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        x = self.l1(x)
        output: Tensor = self.l2(x, torch.ones_like(x, dtype=torch.float32))
        return output
