"""Collectives that a rank has begun and not waited for, and who touches their tensors. Inside a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from lockstep.recorders.torch_internals import FakeTensor, is_view, work_of, written_arguments

Span = tuple[int, int]
"""The addresses of a tensor's memory: from, and up to."""

_WAITS = ("wait", "synchronize", "result", "get_future", "block_current_stream", "is_completed")
"""Methods of a handle after which its user may know that the collective is over."""
_HANDLES_NO_DATA = ("empty", "new_empty", "resize_", "set_", "record_stream", "is_pinned")


@dataclass(slots=True)
class _Begun:
    """A collective that was begun and not waited for."""

    work: dist.Work
    written: list[torch.Tensor]
    spans_written: list[Span]
    spans_read: list[Span]
    title: str
    line: str
    has_raced: bool = False


class InFlight:
    """Watches the tensors of collectives until a caller waits for their handles.

    Args:
        waited: called when one is over, with its title, the tensors that it has written, and its line.
        raced: called when an operation comes too early, with the collective's title and line, with what the
            operation did, and with the operation.
    """

    def __init__(
        self,
        waited: Callable[[str, list[torch.Tensor], str], None],
        raced: Callable[[str, str, str, Any], None],
    ) -> None:
        self._waited, self._raced = waited, raced
        self._begun: dict[int, _Begun] = {}
        self._patched: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __enter__(self) -> Self:
        for kind in (dist.Work, *dist.Work.__subclasses__()):  # those in Python have methods of their own
            for name in _WAITS:
                if before := vars(kind).get(name):
                    after = self._noticing(before, name)
                    self._patched[kind, name] = before, after
                    setattr(kind, name, after)
        return self

    def __exit__(self, *_: object) -> None:
        for (kind, name), (before, after) in self._patched.items():
            if getattr(kind, name) is after:  # else another one has wrapped it since, and calls it
                setattr(kind, name, before)
        self._patched.clear()
        self._begun.clear()

    def is_any(self) -> bool:
        """Return whether a collective is in flight."""
        return bool(self._begun)

    def add(
        self, out: Any, reads: list[torch.Tensor], writes: list[torch.Tensor], title: str, line: str
    ) -> None:
        """Watch a collective that has just begun.

        Args:
            out: what its operator returned: its handle is in there, unless it has none.
        """
        work = work_of(out)
        if work is not None:
            self.watch(work, reads, writes, title, line)

    def watch(
        self, work: dist.Work, reads: list[torch.Tensor], writes: list[torch.Tensor], title: str, line: str
    ) -> None:
        """Watch the collective of a handle."""
        spans = [_span(each) for each in writes], [_span(each) for each in reads]
        self._begun[id(work)] = _Begun(work, writes, *spans, title, line)

    def forget(self, work: dist.Work) -> None:
        """Watch a collective no longer: it is over."""
        self._begun.pop(id(work), None)

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report each collective in flight with an output that `func` reads, or tensors that it writes."""
        __tracebackhide__ = True
        if not _handles_data(func):
            return
        for tensor in _tensors_in((*args, *kwargs.values())):
            span = _span(tensor)
            for begun in list(self._begun.values()):  # another thread may wait
                reads_early = _meet(span, begun.spans_written)
                if begun.has_raced or not (reads_early or _meet(span, begun.spans_read)):  # once is enough
                    continue
                writes = any(tensor is each for each in written_arguments(func, args, kwargs))
                if reads_early or writes:
                    begun.has_raced = True
                    verb = "wrote to its tensors" if writes else "read its output"
                    self._raced(begun.title, begun.line, verb, func)

    def _noticing(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noticing(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # Before the call, in which some backends copy to its tensors.
            begun = self._begun.pop(id(work), None) if self._begun else None
            returned = method(work, *args, **kwargs)
            if begun is not None and name == "is_completed" and not returned:
                self._begun[id(work)] = begun
            elif begun is not None:
                # After `get_future` it may still run.
                self._waited(begun.title, [] if name == "get_future" else begun.written, begun.line)
            return returned

        return noticing


@functools.cache
def _handles_data(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return not (is_view(func) or name.startswith(_HANDLES_NO_DATA) or name.endswith("_like"))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operator, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _span(tensor: torch.Tensor) -> Span:
    if isinstance(tensor, FakeTensor):  # DTensor, which computes the shapes of a result by them
        return 0, 0
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _meet(span: Span, others: list[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)
