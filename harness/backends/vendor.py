"""The default backend of an accelerator, as its maker has registered it with torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.backends.backend import Backend

if TYPE_CHECKING:
    import torch.distributed as dist


class Vendor(Backend):
    """A backend that needs an accelerator for each rank.

    Args:
        device: type of the accelerator.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.devices = (device,)

    def barrier(self, group: dist.ProcessGroup, device: Any) -> None:
        import torch.distributed as dist

        dist.barrier(group, device_ids=[device.index])

    def leave(self, destroy: Callable[[], None]) -> None:
        """Destroy the group: without that torch warns of nccl."""
        destroy()
