"""Linear layers in units, inside units, and bare beside them. Imports torch only."""

from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["AlwaysWrapNestedWrappedModule", "NestedWrappedModule", "NonUniformReqGradNWM"]


class NestedWrappedModule(nn.Module):
    """A unit inside a unit, another beside it, and bare linear layers before and after that the root holds.

    Every group frees and reduces at its own time, and the root's parameters lie at both ends of the model.
    The groups hold 76, 272, 80 and 68 elements: no padding on two and four ranks, some in each on three.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("module.1", "module.1.0", "module.2")

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 4),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
            nn.Linear(16, 4),
            nn.Linear(4, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        output: Tensor = self.module(x)
        return output

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (4, 8), fp32, on the generator's device."""
        return torch.rand(4, 8, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of the output."""
        return output.sum()


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """The same model with every submodule a unit: the root and the containers own nothing."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = (nn.Module,)


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same layers, of which the last alone learns: it shares a unit with the frozen layer before it.

    That unit holds 68 frozen elements and then 40 that learn: on two ranks the first has none of these, and
    so no gradient at all.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("module.1", "module.1.0", "module.2")
    trained: ClassVar[str] = "module.2.1"

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 4),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
            nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 8)),
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.trained))
