"""Collectives of this process passed to a function, which may disturb them."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lockstep.shm.process_group import ShmProcessGroup

__tracebackhide__ = True  # under pytest a failure points to the call

Replacement = Callable[[str, Mapping[str, Any], Callable[..., dist.Work | None]], Any]
"""Called with an operator's name, the arguments (`self` is the group), and what starts the collective with
changed ones; what it returns goes to the caller."""

# Each with the name of the same operation in torch's dispatcher.
_METHODS = {
    "all_gather_single": "_allgather_base_",
    "_allgather_base": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "all_gather_views": "_allgather_base_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_views": "_reduce_scatter_base_",
    "reduce_scatter": "reduce_scatter_",
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "alltoall_base": "alltoall_base_",
    "alltoall": "alltoall_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
    "recv_anysource": "recv_any_source_",
}


def intercept(replacement: Replacement) -> Callable[[], None]:
    """Let `replacement` run every collective of this backend in this process; return what ends that."""
    before = {name: vars(ShmProcessGroup)[name] for name in _METHODS}
    for name, method in before.items():
        setattr(ShmProcessGroup, name, _intercepted(method, _METHODS[name], replacement))

    def end() -> None:
        for name, method in before.items():
            setattr(ShmProcessGroup, name, method)

    return end


def _intercepted(method: Callable[..., Any], name: str, replacement: Replacement) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments

        def start(**changed: Any) -> Any:
            call = inspect.BoundArguments(signature, OrderedDict({**given, **changed}))
            return method(*call.args, **call.kwargs)

        return replacement(name, given, start)

    return intercepted
