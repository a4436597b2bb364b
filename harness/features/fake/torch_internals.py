"""Private names of torch that values of fake worlds use. Seen in torch 2.13. Runs inside a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def done_work(result: list[torch.Tensor]) -> Any:
    """Return the handle of a collective that is over, as operators of the dispatcher return it.

    A fake group's own has no result, and DDP's reducer reads it. If one moves: torch's tests of comm hooks.
    """
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage: that of the C++ object, the same for all views."""
    address: int = tensor.untyped_storage()._cdata
    return address


def weak_storage(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a tensor's storage; while it lives no other storage has its address."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
