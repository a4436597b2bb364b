"""nccl: NVIDIA GPUs, one for each rank."""

from __future__ import annotations

from lockstep.backends.backend import AcceleratorBackend


class Nccl(AcceleratorBackend):
    broken_connection = r"NCCL.*(aborted|remote process exited|socket)"

    def __init__(self) -> None:
        super().__init__("nccl", "cuda")

    def abort(self, is_of_world: bool) -> None:
        import torch.distributed as dist

        from lockstep.backends.torch_internals import abort_nccl_groups

        if is_of_world or "nccl" in dist.get_backend():
            abort_nccl_groups()
