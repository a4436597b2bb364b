"""Errors of the backend `shm`. Imports torch only."""

from __future__ import annotations

import torch.distributed as dist


class ShmError(dist.DistBackendError):
    """Base class of what the backend raises."""


class CollectiveMismatch(ShmError):
    """Ranks called different collectives, or the same with other sizes, dtypes or roots."""


class PeerLost(ShmError):
    """A rank has died, or has left the group, while others wait for it."""


class GroupAborted(ShmError):
    """This rank or a peer has aborted the group."""


class CollectiveTimeout(ShmError):
    """A rank did not come within the timeout of the group."""


class OutOfSharedMemory(ShmError):
    """There is no memory for what a collective has to hand over."""


class MeetingFailed(ShmError):
    """The ranks cannot share memory: other hosts, other versions, too few descriptors."""
