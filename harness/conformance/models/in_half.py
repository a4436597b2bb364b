"""A model that computes in fp16 and keeps its parameters in fp32. Imports torch only."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["InHalf"]


class InHalf(nn.Module):
    """Cast parameters and the input of ``bare`` to fp16 in each forward: a reference for mixed precision."""

    def __init__(self, bare: nn.Module) -> None:
        super().__init__()
        self.bare = bare

    def forward(self, x: Tensor) -> Any:
        """Return what ``bare`` makes of ``x``, in fp16."""
        halves = {name: parameter.to(torch.float16) for name, parameter in self.bare.named_parameters()}
        return functional_call(self.bare, halves, x.to(torch.float16))
