"""nccl: NVIDIA GPUs, one for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.backends.backend import Backend

if TYPE_CHECKING:
    import torch.distributed as dist


class Nccl(Backend):
    name = "nccl"
    devices = ("cuda",)
    broken_connection = r"NCCL.*(aborted|remote process exited|socket)"

    def prepare(self, recorded: int) -> None:
        # nccl's own name of the size of the flight recorder, of old; torch warns of it.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(recorded))

    def barrier(self, group: dist.ProcessGroup, device: Any) -> None:
        import torch.distributed as dist

        dist.barrier(group, device_ids=[device.index])

    def abort(self, is_of_world: bool) -> None:
        import torch.distributed as dist

        from lockstep.backends.torch_internals import abort_nccl_groups

        if is_of_world or "nccl" in dist.get_backend():
            abort_nccl_groups()

    def leave(self, destroy: Callable[[], None]) -> None:
        """Destroy the group: without that torch warns."""
        destroy()
