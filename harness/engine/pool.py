"""Memory that one group after the other sends its gradients from and receives them in. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Lend 1-D buffers whose values are undefined, and keep what is given back until `clear`.

    A backward has one reduction in flight, so two buffers of the largest group's size serve all of it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D buffer of ``numel`` elements: one that is free and large enough, else a new one."""
        if numel == 0:  # it would have no address to be known by
            return torch.empty(0, dtype=dtype, device=device)
        fitting = [b for b in self._free if (b.dtype, b.device) == (dtype, device) and b.numel() >= numel]
        if fitting:
            whole = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not whole]
        else:
            whole = torch.empty(numel, dtype=dtype, device=device)
        self._lent[whole.data_ptr()] = whole
        return whole[:numel]

    def take_like(self, other: Tensor) -> Tensor:
        return self.take(other.numel(), other.dtype, other.device)

    def give(self, buffer: Tensor) -> None:
        """Take back what `take` returned."""
        if buffer.numel():
            self._free.append(self._lent.pop(buffer.data_ptr()))

    def clear(self) -> None:
        """Give all free memory back, and forget what was lent and never returned."""
        self._free, self._lent = [], {}
