"""Layers with different dtypes of parameters, buffers, inputs and computation. Imports torch only."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

_WIDTH = 10


class LinearMixedPrecision(nn.Module):
    """A linear layer `lin` of a dtype of choice, and a buffer of fp64 that is added to what it returns.

    The buffer's name is of choice too: where modules share it, names with and without prefix look alike.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ()

    def __init__(self, param_dtype: torch.dtype, buffer_name: str = "buffer") -> None:
        super().__init__()
        self.lin = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=param_dtype)
        self.buffer_name = buffer_name
        self.register_buffer(buffer_name, torch.rand(_WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 10); `x` has the dtype of the layer."""
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
    """Two such layers with buffers `buffer0` and `buffer1`; the first is a unit, the other the root's."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("0",)
    batch = LinearMixedPrecision.batch
    loss = LinearMixedPrecision.loss

    def __init__(self, param_dtype: torch.dtype) -> None:
        super().__init__(*(LinearMixedPrecision(param_dtype, f"buffer{i}") for i in range(2)))


class CastingLayer(nn.Module):
    """A linear layer that casts the input to the weight's dtype if `casts`."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        output: Tensor = self.l(x.to(self.l.weight.dtype) if self.casts else x)
        return output


class CastingLayers(nn.Module):
    """Two layers, `c1` and `c2`, that cast for themselves if `casts`: their `l` shows the result."""

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
    """A layer `l2` that gets the output of the layer `l1` and an fp32 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(8, 8), Sum(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        x = self.l1(x)
        output: Tensor = self.l2(x, torch.ones_like(x, dtype=torch.float32))
        return output


class InHalf(nn.Module):
    """Cast parameters and the input of `bare` to fp16 in each forward: a reference for mixed precision."""

    def __init__(self, bare: nn.Module) -> None:
        super().__init__()
        self.bare = bare

    def forward(self, x: Tensor) -> Any:
        """Return what `bare` makes of `x`, in fp16."""
        halves = {name: parameter.to(torch.float16) for name, parameter in self.bare.named_parameters()}
        return functional_call(self.bare, halves, x.to(torch.float16))


class BatchNormNet(nn.Module):
    """Norms between linear layers: what computes in full precision, next to what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 40, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.fc2 = nn.Linear(40, 4, bias=False)
        self.ln = nn.LayerNorm(4)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 2) to probabilities (batch, 4)."""
        x = self.bn(self.fc1(x).view(-1, 4, 10)).view(-1, 40)
        output: Tensor = self.fc3(self.ln(self.fc2(x)))
        return output.softmax(dim=1)

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (3, 2), fp32, on the generator's device."""
        return torch.randn(3, 2, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of squared probabilities; their sum would be a constant."""
        return output.square().sum()
