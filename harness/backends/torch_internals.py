"""Private names of torch that backends use. Seen in torch 2.13. Imports torch; runs on ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d


def abort_nccl_groups() -> None:
    """Abort all groups of NCCL: what waits in their collectives returns. Not public yet."""
    _c10d._abort_process_group()


def fake_store() -> dist.Store:
    """Return a store for a fake group, whose backend torch registers when this module is imported.

    If it moves: what torch's own tests pass to `init_process_group("fake")`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
