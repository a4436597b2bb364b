"""A log of the collectives that a rank issues. Inside a rank; imports torch."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from lockstep.recorders.tensors import named_tensors, short
from lockstep.recorders.torch_internals import TorchDispatchMode, group_of, in_backward, untraced

if TYPE_CHECKING:
    from lockstep.shm import Entry

__all__ = ["Collective", "CollectivesLog"]

T = TypeVar("T")

# The name of an operation in torch.distributed, by its name in the dispatcher or on shm. Operations that are
# not listed have torch's spelling already, except for a trailing `_`, or `_out` of a functional one.
_SPELLING = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "isend": "send",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "all_gather_single": "all_gather_into_tensor",  # names that torch 2.13 adds, and shm uses
    "reduce_scatter_single": "reduce_scatter_tensor",
}
OPS = {*_SPELLING.values(), "broadcast", "reduce", "scatter", "gather", "barrier", "monitored_barrier"}
"""The names in torch.distributed of all collectives, sends and receives."""
NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
"""Operators that start nothing: waiting, bookkeeping of autograd, a check of values."""


def spelled(name: str) -> str:
    """Return the name in torch.distributed of an operation of the dispatcher."""
    return _SPELLING.get(name, name.rstrip("_").removesuffix("_out"))


@dataclass(frozen=True)
class Collective:
    """One collective as this rank issued it.

    Attributes:
        op: the name torch.distributed gives it: `all_reduce`, `reduce_scatter_tensor`, ...
        dtypes: dtype of each input tensor, in order. A list form (`reduce_scatter`, `*_coalesced`) has as
            many as its list; `barrier`, `recv`, and `scatter` off its source have none.
        shapes: shape of each input tensor, in the same order.
        nbytes: bytes of all input tensors together (dense size). It is what this rank hands in, not what
            travels: a broadcast counts its tensor on every rank.
        group_size: ranks in the group.
        index: place in the log that holds it, from 0.
        in_backward: whether autograd was running on this thread.
        label: the name of the innermost `torch.profiler.record_function` around it, "" if there is none.
            Engines name there the purpose of the collective.
        group: torch's name of the process group.
    """

    op: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    group_size: int
    index: int
    in_backward: bool
    label: str = ""
    group: str = field(default="", compare=False)  # a group that is made again has another

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the inputs; ValueError if there is none or they differ."""
        return _only(set(self.dtypes), f"dtypes of {self}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the one input; ValueError if there is not exactly one."""
        return _only(self.shapes, f"shapes of {self}")

    def __str__(self) -> str:
        inputs = ", ".join(f"{short(d)}{list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True))
        phase = f"{'backward' if self.in_backward else ''} {self.label}"
        head = f"{self.index:>4}  {self.op:<32} {self.nbytes:>10} B  {self.group_size:>3} ranks"
        return f"{head}  {inputs}  {phase}".rstrip()


class CollectivesLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Record every collective that this thread issues while the log is entered.

    It sees `torch.distributed`, the functional collectives, what DTensor issues inside its operators, object
    collectives (as torch sends them: first the sizes in int64, then the pickled bytes in uint8), and what
    DDP's reducer or an engine issues in backward. The last was verified on CPU, where backward runs on the
    thread that called it. Logs nest: the inner one holds its part, the outer one everything. Entered again, a
    log continues.

        with CollectivesLog() as log:
            loss.backward()
        assert log.dtypes("reduce_scatter_tensor") == {torch.bfloat16}

    Each operation of torch costs some microseconds more while a log is on: enter it around what it is to see.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: list[Collective] = []
        self._labels: list[str] = []
        self._was_entered = False
        self._thread = 0
        self._is_recorded = False
        """True while the dispatcher is in a collective that has its entry already."""
        self._leave: list[Callable[[], None]] = []
        self._blind_since = 0
        """Time of entering, in nanoseconds since the epoch, where nothing had imported shm then."""
        self._misses_shm = False

    def __enter__(self) -> Self:
        self._was_entered = True
        self._thread = threading.get_ident()
        if shm := sys.modules.get("lockstep.shm"):  # the dispatcher does not see its groups
            self._leave.append(shm.observe(self._record_shm))
        else:
            self._blind_since = time.time_ns()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self._leave:
            self._leave.pop()()
        else:
            self._misses_shm = self._has_missed_shm()
            self._blind_since = 0

    def _has_missed_shm(self) -> bool:
        """Return whether shm was imported, and used, since this log was entered without it."""
        shm = sys.modules.get("lockstep.shm") if self._blind_since else None
        calls = [] if shm is None else shm.record()
        return self._misses_shm or any(call["time_created_ns"] >= self._blind_since for call in calls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method by `torch.compiler.disable`, see `untraced`

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A wrapper subclass (DTensor, a pending functional result) goes first, and comes back here with plain
        # tensors: what it issues while it handles an operation would be invisible inside this call.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if "c10d" in func.namespace and (name := func.overloadpacket.__name__) not in NOT_COLLECTIVES:
            names = (argument.name for argument in func._schema.arguments)
            self._record(name, dict(zip(names, args, strict=False)) | (kwargs or {}))
            self._is_recorded = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._is_recorded = False
        elif func.namespace == "profiler":
            name = func.overloadpacket.__name__
            if name.startswith("_record_function_enter"):
                self._labels.append(args[0])
            elif name.startswith("_record_function_exit") and self._labels:
                self._labels.pop()
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, arguments: Mapping[str, Any]) -> None:
        op = spelled(name)
        # A collective reads its argument `input...`, else `tensors`.
        read = [value for key, value in arguments.items() if key.startswith("input") and "split" not in key]
        tensors = named_tensors(read[0] if read else arguments.get("tensors"))
        inputs = [] if op == "recv" else list(tensors.values())
        group = group_of(arguments.get("process_group", arguments.get("group_name")))
        self._append(op, [(t.shape, t.dtype) for t in inputs], group.size(), group.group_name)

    def _record_shm(self, entry: Entry) -> None:
        if threading.get_ident() == self._thread and not self._is_recorded:
            self._append(_SPELLING.get(entry.op, entry.op), entry.inputs, entry.group_size, entry.group)

    def _append(
        self, op: str, inputs: Sequence[tuple[torch.Size, torch.dtype]], group_size: int, group: str
    ) -> None:
        self._entries.append(
            Collective(
                op=op,
                dtypes=tuple(dtype for _, dtype in inputs),
                shapes=tuple(tuple(shape) for shape, _ in inputs),
                nbytes=sum(shape.numel() * dtype.itemsize for shape, dtype in inputs),
                group_size=group_size,
                index=len(self._entries),
                in_backward=in_backward(),
                label=self._labels[-1] if self._labels else "",
                group=group,
            )
        )

    @property
    def entries(self) -> tuple[Collective, ...]:
        """Return the collectives, in order; RuntimeError if the log was never entered, or has missed some."""
        if not self._was_entered:
            raise RuntimeError("this log was never entered: that it is empty proves nothing")
        if self._has_missed_shm():
            raise RuntimeError(
                "this log has missed collectives of shm, which was imported after the log was entered: write "
                "`import lockstep.shm` at the top of the file"
            )
        return tuple(self._entries)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def counts(self) -> dict[str, int]:
        """Return how often each operation occurred; one that did not occur has no key."""
        return dict(Counter(entry.op for entry in self.entries))

    def count(self, op: str) -> int:
        """Return how often `op` occurred, maybe 0; ValueError if torch has no such collective."""
        # A misspelt name would count 0 always.
        if op not in OPS and op not in self.counts():
            raise ValueError(f"{op!r} is not a collective; known: {', '.join(sorted(OPS))}")
        return self.counts().get(op, 0)

    def of(self, op: str) -> tuple[Collective, ...]:
        """Return the entries of `op` in order; AssertionError if there are none, ValueError as in `count`."""
        if self.count(op) == 0:
            seen = ", ".join(f"{name} x {n}" for name, n in self.counts().items()) or "no collective at all"
            raise AssertionError(f"no {op} was seen; seen: {seen}")
        return tuple(entry for entry in self.entries if entry.op == op)

    def dtypes(self, op: str) -> set[torch.dtype]:
        """Return the dtypes that `op` was handed; errors as in `of`."""
        return {dtype for entry in self.of(op) for dtype in entry.dtypes}

    def nbytes(self, op: str) -> int:
        """Return the bytes this rank handed to `op` altogether; errors as in `of`."""
        return sum(entry.nbytes for entry in self.of(op))

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.entries) or "no collective was seen"

    # pytest shows the repr of what an assert compared.
    __repr__ = __str__


def _only(values: Collection[T], what: str) -> T:
    if len(values) != 1:
        raise ValueError(f"expected exactly one, got {len(values)} {what}")
    return next(iter(values))
