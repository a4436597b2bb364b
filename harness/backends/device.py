"""A type of device: "cpu", or a type of accelerator that torch knows, such as "cuda".

Used on both sides; imports torch where an accelerator is asked about.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU = "cpu"
_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that says which devices of a type a process sees; processes see all of any other type."""


@dataclass(frozen=True, slots=True)
class Device:
    """A type of device that the tensors of a world belong to."""

    type: str

    @property
    def is_cpu(self) -> bool:
        return self.type == CPU

    @property
    def unit(self) -> str:
        """One device of this type, as a report names it."""
        return "GPU" if self.type in ("cuda", "xpu") else f"{self.type} device"

    @property
    def default_backend(self) -> str:
        """Name of the backend that torch.distributed uses for it.

        Raises:
            ValueError: there is none; the message says what to write.
        """
        if self.is_cpu:
            return "gloo"
        import torch.distributed as dist

        try:
            return dist.get_default_backend_for_device(self.type)
        except (RuntimeError, ValueError):  # torch knows no such device, or no backend for it
            known = ", ".join(dist.Backend.default_device_backend_map)
            raise ValueError(f"torch.distributed has no backend for it; it has one for {known}") from None

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.type)

    def count(self) -> int:
        """Return how many there are that this process sees."""
        try:
            return int(self._module.device_count())
        except (RuntimeError, AttributeError):  # torch knows no such device, or has no module for it
            return 0

    def names(self) -> tuple[str, ...]:
        """Return the names of those that this process sees: numbers, unless the variable names them."""
        number, variable = self.count(), os.environ.get(_VARIABLES.get(self.type, ""))
        names = map(str, range(number)) if variable is None else map(str.strip, variable.split(","))
        return tuple(names)[:number]  # what follows a wrong name is ignored

    def of_rank(self, local_rank: int, names: Sequence[str]) -> torch.device:
        """Return the device of a rank, by its number among those that it will see.

        Args:
            names: the devices that its world has leased; empty if it has leased none.
        """
        import torch

        if self.is_cpu:
            return torch.device(CPU)
        index = local_rank % (len(names) or max(self.count(), 1))
        is_number_of_all = names and self.type not in _VARIABLES
        return torch.device(self.type, int(names[index]) if is_number_of_all else index)

    def use(self, device: torch.device, names: Sequence[str]) -> None:
        """Make a device the current one of this process, which has used none yet, and let it see no other.

        Args:
            names: the devices that it may see; empty for all.
        """
        if self.is_cpu:
            return
        if names and self.type in _VARIABLES:
            os.environ[_VARIABLES[self.type]] = ",".join(names)
        self._module.set_device(device)

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type."""
        self._module.manual_seed_all(seed)

    @property
    def has_module(self) -> bool:
        """Whether torch has a module for it, which the package of its maker registers."""
        try:
            return self._module is not None
        except RuntimeError:
            return False

    def error(self) -> str:
        """Wait until the current device has nothing left to do; return the first line of its error.

        It is of what this process has queued there; from some errors the process does not recover.
        """
        try:
            self._call("synchronize")
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def stream(self) -> Any:
        """Return the current stream, which names its device; None where the type has none."""
        return self._call("current_stream")

    def use_stream(self, stream: Any) -> None:
        """Make a stream the current one, and its device the current device."""
        self._call("set_stream", stream)

    def reset_peak_memory(self) -> None:
        """Let the peak of memory be that of now, where its allocator has one."""
        with contextlib.suppress(RuntimeError):
            self._call("reset_peak_memory_stats")

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._module, name, None)  # not every maker's module has all
        return None if function is None else function(*arguments)

    def is_used(self) -> bool:
        """Return whether this process has used one, as far as torch knows."""
        return bool(getattr(self._module, "is_initialized", bool)())


def accelerator() -> Device | None:
    """Return the type of accelerator that torch finds on this machine; None without any."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else Device(found.type)
