"""Layers whose parameters, buffers and inputs have different dtypes. Imports torch only."""

from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["LinearMixedPrecision", "NestedLinearMixedPrecision"]

_WIDTH = 10


class LinearMixedPrecision(nn.Module):
    """A linear layer ``lin`` of a dtype of choice, and a buffer of fp64 that is added to what it returns.

    The buffer's name is of choice too: where modules share it, names with and without prefix look alike.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ()

    def __init__(self, param_dtype: torch.dtype, buffer_name: str = "buffer") -> None:
        super().__init__()
        self.lin = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=param_dtype)
        self.buffer_name = buffer_name
        self.register_buffer(buffer_name, torch.rand(_WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 10); ``x`` has the dtype of the layer."""
        output: Tensor = self.lin(x) + self.get_buffer(self.buffer_name).to(x.dtype)
        return output

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (3, 10), fp32, on the generator's device."""
        return torch.randn(3, _WIDTH, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of the output."""
        return output.sum()


class NestedLinearMixedPrecision(nn.Sequential):
    """Two such layers with buffers ``buffer0`` and ``buffer1``; the first is a unit, the other the root's."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("0",)
    batch = LinearMixedPrecision.batch
    loss = LinearMixedPrecision.loss

    def __init__(self, param_dtype: torch.dtype) -> None:
        super().__init__(*(LinearMixedPrecision(param_dtype, f"buffer{i}") for i in range(2)))
