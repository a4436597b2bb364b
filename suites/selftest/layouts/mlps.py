"""MLPs that plans shard, their loss, and batches of numbers and of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.layouts import witness_batches
from suites.selftest.layouts.model import VOCAB

BATCHES = witness_batches(VOCAB)


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, inner)
        self.down = nn.Linear(inner, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


def build_mlps(inner: int = 5) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Mlp(inner), Mlp(inner), Mlp(inner)).double()


def build_even() -> nn.Sequential:
    """Return what RowwiseParallel can cut: torch 2.13 has no uneven parts there."""
    return build_mlps(6)


def mean_square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def pairs(steps: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randn(24, 6, generator=generator, dtype=torch.float64) for name in "xy"}
        for _ in range(steps)
    ]
