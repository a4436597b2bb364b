"""Private names of torch that disturbances use, with what to look for when one moves. Seen in torch 2.13."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

__tracebackhide__ = True  # under pytest a failure points to the call

Start = Callable[..., Any]
"""Start a collective with changed arguments, by keyword; return its handle, or None."""
Replacement = Callable[[str, Mapping[str, Any], Start], Any]
"""Called with a collective's name in the dispatcher, its arguments, and what starts it."""

_KEY = torch._C.DispatchKey.BackendSelect

# What ProcessGroup calls for every collective of its C++ backends. If one moves:
# the names in torch/csrc/distributed/c10d/Ops.cpp.
_OPERATORS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "monitored_barrier_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)


@contextlib.contextmanager
def replaced_kernels(replacement: Replacement) -> Iterator[None]:
    """Let `replacement` run each collective of torch's own backends in this process, on all its threads.

    The operators in the dispatcher, which Python, DDP's reducer and functional collectives all reach, get a
    kernel in front of those of their devices: for the key that every call has. If it moves: the keys in
    `default_included_set` of c10/core/DispatchKeySet.h.
    """
    make: Any = torch.library.Library
    library = make("c10d", "IMPL")
    try:
        for name in _OPERATORS:
            operator = getattr(torch.ops.c10d, name).default
            library.impl(
                name, functools.partial(_run, operator, name, replacement), _KEY.name, with_keyset=True
            )
        yield
    finally:
        library._destroy()


def _run(operator: Any, name: str, replacement: Replacement, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    schema = operator._schema
    # The dispatcher leaves out what equals the default.
    given = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    names = (each.name for each in schema.arguments)
    given |= dict(zip(names, args, strict=False)) | kwargs

    def start(**changed: Any) -> Any:
        values = given | changed
        # This gives up the GIL, unlike `call_boxed` of the kernel: a thread of gloo that drops a tensor which
        # Python has dropped before wants the GIL, and holds the lock that the kernel takes.
        returned = operator.redispatch(keyset.remove(_KEY), *(values[each.name] for each in schema.arguments))
        handle = returned[-1] if isinstance(returned, tuple | list) else returned
        return None if handle is None else dist.Work.unbox(handle)

    work = replacement(name, given, start)
    if not schema.returns:
        return None
    boxed = work.boxed()
    return boxed if len(schema.returns) == 1 else (given[schema.arguments[0].name], boxed)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no dispatch mode, of a log for example, sees what is computed.

    If it moves: `torch.utils._python_dispatch._disable_current_modes`, which takes fifteen times as long.
    """
    guard: contextlib.AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def is_coalescing(group: dist.ProcessGroup) -> bool:
    """Return whether collectives of a group are being batched: their handles then mean nothing.

    If it moves: what `_coalescing_manager` writes to.
    """
    return group in getattr(dist.distributed_c10d._world, "pg_coalesce_state", {})


@contextlib.contextmanager
def delayed_callbacks(delay: Callable[[], None]) -> Iterator[None]:
    """Call `delay` before each callback that Python code queues for the end of a backward.

    If it moves: what FSDP calls `queue_callback` on.
    """
    holder: Any = Variable
    before = holder._execution_engine
    holder._execution_engine = _DelayingEngine(before, delay)
    try:
        yield
    finally:
        holder._execution_engine = before


class _DelayingEngine:
    """The engine of autograd, whose callbacks come late."""

    def __init__(self, engine: Any, delay: Callable[[], None]) -> None:
        self._engine, self._delay = engine, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        def delayed() -> None:
            self._delay()
            callback()

        self._engine.queue_callback(delayed)
