"""fake: one process that stands for any rank of a world, and receives nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.backends.backend import Backend

if TYPE_CHECKING:
    import torch.distributed as dist


class Fake(Backend):
    name = "fake"
    devices = ("cpu", "cuda")
    module = "torch.testing._internal.distributed.fake_pg"
    lacks = frozenset({"values"})
    takes_devices = False
    meets = False

    def store(self) -> dist.Store:
        from lockstep.backends.torch_internals import fake_store

        return fake_store()
