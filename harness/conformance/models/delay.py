"""A rank that is late, and the pause that makes it so. Imports torch only."""

import time

import torch
from torch import Tensor

from harness.conformance.models.nested import NestedWrappedModule

__all__ = ["NestedWrappedModuleWithDelay", "pause"]

_CYCLES_PER_MS = 2_000_000  # clocks of CUDA devices lie between 1 and 2 GHz


class NestedWrappedModuleWithDelay(NestedWrappedModule):
    """`NestedWrappedModule` on a rank that is late. Which rank: the one that is given milliseconds above 0.

    ``delay_after_loss_ms``: in `backward`, when all gradients are there: this rank's optimizer steps late.
    ``delay_before_reduction_ms``: before the gradients of each of the four layers, so that every reduction
    starts late. The delay is registered by forward and needs no help of whoever runs backward.
    """

    def __init__(self, delay_after_loss_ms: float = 0, delay_before_reduction_ms: float = 0) -> None:
        super().__init__()
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        for layer in self.module:
            x = layer(x)
            if self.delay_before_reduction_ms and x.requires_grad:
                x.register_hook(lambda gradient: pause(gradient.device, self.delay_before_reduction_ms))  # type: ignore[no-untyped-call]
        return x

    def backward(self, loss: Tensor) -> None:
        """Run backward of ``loss``, and be late after it."""
        loss.backward()  # type: ignore[no-untyped-call]
        pause(loss.device, self.delay_after_loss_ms)


def pause(device: torch.device, milliseconds: float) -> None:
    """Let nothing that comes next on ``device`` begin for about so long: on CUDA, on the current stream."""
    if milliseconds and device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]
    elif milliseconds:
        time.sleep(milliseconds / 1000)
