"""The buffers of one unit: cast and moved for computation, and remembered as they were. Runs on ranks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.engine.parameters import Slot


class Buffers:
    """Cast what lies in ``slots``, by name within the unit's module.

    ``dtypes``: those that cast buffers had before and are saved in. With ``goes_back`` the values are kept as
    well: a buffer that nobody changed meanwhile goes back to every bit it had, and not to rounded values.
    """

    def __init__(self, slots: Mapping[str, Slot], goes_back: bool) -> None:
        self.dtypes: dict[str, torch.dtype] = {}
        self._slots = dict(slots)
        self._goes_back = goes_back
        self._values: dict[str, Tensor] = {}

    def prepare(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        """Let modules see floating-point buffers in ``dtype``, or as they were; all of them on ``device``."""
        if not self._slots:
            return
        # A tensor made in inference mode could not be written to in training.
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self._slots.items():
                buffer = slot.module._buffers.get(slot.name)
                if buffer is not None:
                    buffer = self._cast(name, buffer, dtype) if buffer.is_floating_point() else buffer
                    slot.module._buffers[slot.name] = buffer.to(device or buffer.device)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow a cast of the module."""
        self.dtypes = {name: fn(torch.empty(0, dtype=dtype)).dtype for name, dtype in self.dtypes.items()}

    def _cast(self, name: str, buffer: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype and buffer.dtype != dtype:
            self.dtypes[name] = buffer.dtype
            if self._goes_back:
                self._values[name] = buffer
            return buffer.to(dtype)
        return buffer if dtype else self._restore(name, buffer)

    def _restore(self, name: str, buffer: Tensor) -> Tensor:
        value = self._values.pop(name, None)
        if value is not None and torch.equal(value.to(buffer.device, buffer.dtype), buffer):
            buffer = value.to(buffer.device)  # from where it was before a move of the module
        return buffer.to(self.dtypes.get(name, buffer.dtype))
