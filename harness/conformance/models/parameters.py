"""Weights with gradients known to the bit, and parameters of odd shapes and kinds. Imports torch only."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class KnownGradient(nn.Module):
    """One weight, at first zero. Its gradient is the input of forward: every bit of a reduction shows."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a 0-dim loss; `gradient` is broadcast to the weight's shape."""
        return (self.weight * gradient).sum()


class KnownGradients(nn.Sequential):
    """Four such weights of `num` elements with the same gradient: the first and the last are the root's."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("1", "2")

    def __init__(self, num: int) -> None:
        super().__init__(*(KnownGradient(num) for _ in range(4)))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a 0-dim loss."""
        return torch.stack([module(gradient) for module in self]).sum()


class MLP(nn.Module):
    """Widen, narrow again, and rectify after both: of a stack of them each is a unit.

    `dim_multiplier` 3 gives dimensions that few worlds divide evenly.
    """

    def __init__(self, dim: int, dim_multiplier: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, dim) to (batch, dim)."""
        return torch.relu(self.out_proj(torch.relu(self.in_proj(x))))


class UnevenShapes(nn.Module):
    """Parameters that no world divides evenly: of no element, of one and without dimensions; a tied weight.

    The unit `gate` has a single element, so that all ranks but one hold nothing of it.
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


class OddParameter(nn.Module):
    """A linear layer (4, 4) beside a parameter `odd` of any kind, which forward does not read."""

    def __init__(self, odd: Tensor, requires_grad: bool = False) -> None:
        super().__init__()
        self.linear, self.odd = nn.Linear(4, 4), nn.Parameter(odd, requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 4) to (batch, 4)."""
        output: Tensor = self.linear(x)
        return output


class ForeignTensor(Tensor):
    """A tensor of a class that no engine knows."""
