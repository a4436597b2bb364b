"""The ends of a group, all in one process."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from lockstep.shm.channel import Channel
from lockstep.shm.meeting import meet

SECOND = datetime.timedelta(seconds=1)


def meet_all(size: int, timeout: datetime.timedelta = 20 * SECOND) -> list[Channel]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(store, rank, size, timeout, "g"), range(size)))
