"""The record of what this process has called: torch's flight recorder sees nothing of this backend.

Entries have the shape of those of torch's flight recorder.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


class Entry:
    """One call: what torch's flight recorder keeps of a collective, in attributes.

    Attributes:
        group: Name of the process group, and what it is described by.
        group_size: How many ranks that has.
        generation: Which group of this process it is, counted from 0.
        number: Number of the collective in its group, from 1; of the message, for point-to-point.
        op: torch's name.
        inputs: Sizes and dtype of each tensor that it reads.
        outputs: Tensors that it fills, likewise.
        peer: The other rank of a point-to-point operation, -1 otherwise and for any rank.
        is_p2p: Whether it is one.
        created: When it was called, nanoseconds since the epoch.
        completed: When it was completed, or ended with an error, or 0.
        frames: The stack of its caller, innermost first, where an observer has noted it.
    """

    __slots__ = (
        "completed",
        "created",
        "description",
        "frames",
        "generation",
        "group",
        "group_size",
        "id",
        "inputs",
        "is_p2p",
        "number",
        "op",
        "outputs",
        "peer",
        "timeout",
    )

    def __init__(self, op: str, number: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.op, self.number = op, number
        self.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self.outputs = [(tensor.shape, tensor.dtype) for tensor in outputs]
        self.id = self.generation = self.group_size = 0
        self.group = self.description = ""
        self.peer, self.is_p2p = -1, False
        self.timeout = 0.0
        self.frames: list[dict[str, Any]] = []
        self.created, self.completed = time.time_ns(), 0

    def complete(self) -> None:
        """Note that it is over."""
        self.completed = time.time_ns()

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of torch's flight recorder."""
        return {
            "record_id": self.id,
            "pg_id": self.generation,
            "process_group": [self.group, self.description],
            "collective_seq_id": 0 if self.is_p2p else self.number,
            "p2p_seq_id": self.number if self.is_p2p else 0,
            "op_id": self.id,
            "profiling_name": f"shm:{self.op}",
            "time_created_ns": self.created,
            "input_sizes": [list(shape) for shape, _ in self.inputs],
            "input_dtypes": [_name(dtype) for _, dtype in self.inputs],
            "output_sizes": [list(shape) for shape, _ in self.outputs],
            "output_dtypes": [_name(dtype) for _, dtype in self.outputs],
            "state": "completed" if self.completed else "scheduled",
            "time_discovered_started_ns": self.created,
            "time_discovered_completed_ns": self.completed or None,
            "retired": bool(self.completed),
            "timeout_ms": int(self.timeout * 1000),
            "is_p2p": self.is_p2p,
            "peer": self.peer,
            "frames": self.frames,
        }


Observer = Callable[[Entry], None]


def _buffer_size() -> int:
    text = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    return int(text) if text.isdecimal() and len(text) < 10 else 2000


class CallRecorder:
    """The latest calls of this process, and functions that are called with each."""

    def __init__(self, kept: int) -> None:
        self.entries: deque[Entry] = deque(maxlen=kept)
        self.observers: list[Observer] = []
        self._count = 0
        self._groups = 0

    def number_group(self) -> int:
        """Return a number for a new group."""
        self._groups += 1
        return self._groups - 1

    def add(self, entry: Entry) -> None:
        """Keep an entry, and pass it to the observers."""
        entry.id = self._count
        self._count += 1
        self.entries.append(entry)
        for observer in self.observers:
            observer(entry)


# The one of this process, as torch's flight recorder is.
recorder = CallRecorder(_buffer_size())


def keep(number: int) -> None:
    """Keep so many of the latest calls from now on."""
    recorder.entries = deque(recorder.entries, maxlen=number)


def record() -> list[dict[str, Any]]:
    """Return the latest calls of this process, oldest first, in the shape of torch's flight recorder."""
    return [entry.as_dict() for entry in list(recorder.entries)]


def observe(observer: Observer) -> Callable[[], None]:
    """Call `observer` with each collective of this process when it begins; return what ends that."""
    recorder.observers.append(observer)
    return lambda: recorder.observers.remove(observer)


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()
