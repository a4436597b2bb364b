"""Parameters that no world divides evenly. Imports torch only."""

from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["UnevenShapes"]


class UnevenShapes(nn.Module):
    """Parameters that no world divides evenly: of no element, of one and without dimensions; a tied weight.

    The unit ``gate`` has a single element, so that all ranks but one hold nothing of it.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("body", "body.gate")

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(8, 5)
        self.body = nn.Sequential()
        self.body.linear = nn.Linear(5, 5)
        self.body.gate = nn.PReLU()
        self.last = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.last.weight
        self.register_buffer("offset", torch.full((5,), 1 + 2**-12))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 3)."""
        x = self.body(self.first(x) * self.scalar + self.offset)
        output: Tensor = self.last(x) + self.tied(x) * self.one + self.empty.sum()
        return output

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (4, 8), fp32, on the generator's device."""
        return torch.rand(4, 8, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of the squared output."""
        return output.square().sum()
