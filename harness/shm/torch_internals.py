"""The private names of torch that the backend uses, each with what to look for when it moves."""

from __future__ import annotations

import datetime
from typing import Any

import torch._C._distributed_c10d as c10d
from torch.distributed import distributed_c10d


def backend_options(name: str, timeout: datetime.timedelta) -> Any:
    """Return the options of a backend, as torch.distributed reads its timeout from them.

    Seen in torch 2.13 as `Backend.Options` of the C++ classes; `torch.distributed.Backend` is another class.
    If it moves: look for what `ProcessGroupGloo.Options` derives from.
    """
    return c10d.Backend.Options(name, timeout)


def empty_backend(rank: int, size: int) -> Any:
    """Return a backend of no methods, to be registered for a device; None where torch can make none.

    torch 2.15 attaches a hook to the backend of each device of a new group (`HealthCheckHook`), and fails
    where there is none; from 2.11 to 2.13 a `Backend` had no constructor. If it moves: what
    `_new_process_group_helper` attaches to a group that a backend has made itself.
    """
    try:
        return c10d.Backend(rank, size)
    except TypeError:
        return None


def records_itself(name: str) -> None:
    """Keep torch's flight recorder from hooks on groups of a backend that keeps a record of its own.

    Since torch 2.15 they are attached to all others, by the name of the registered backend of each device. If
    it moves: what `_maybe_attach_flight_recorder` looks the backend up in.
    """
    known: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    known.add(name)
