"""Collectives through shared memory: a backend of torch.distributed for CPU tensors of ranks on one host.

`import lockstep.shm` makes `torch.distributed.init_process_group("shm", ...)` work. Runs on ranks, on Linux;
imports torch and the standard library only.
"""

import torch.distributed as _dist

from lockstep.shm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    MeetingFailed,
    OutOfSharedMemory,
    PeerLost,
    ShmError,
)
from lockstep.shm.interception import intercept
from lockstep.shm.membership import waits
from lockstep.shm.process_group import NAME, ShmProcessGroup, abort_all, create
from lockstep.shm.record import Entry, keep, observe, record
from lockstep.shm.torch_internals import records_itself as _records_itself
from lockstep.shm.work import ShmWork

__all__ = [
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Entry",
    "GroupAborted",
    "MeetingFailed",
    "OutOfSharedMemory",
    "PeerLost",
    "ShmError",
    "ShmProcessGroup",
    "ShmWork",
    "abort_all",
    "intercept",
    "keep",
    "observe",
    "record",
    "waits",
]

if NAME not in _dist.Backend.backend_list:
    _records_itself(NAME)
    _dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
