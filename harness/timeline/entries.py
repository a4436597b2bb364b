"""Reading of one entry of torch's flight recorder: group, operation, bytes, the user's line, the phase.

Used on both sides; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.protocol import DEFAULT_GROUP
from harness.tracebacks import is_installed

Entry = Mapping[str, Any]
"""One call, with the keys of torch's flight recorder."""

_SIZES = {
    **dict.fromkeys(("complexdouble",), 16),
    **dict.fromkeys(("double", "long", "complexfloat", "float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32", "uint32", "complexhalf"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("char", "byte", "bool", "int8", "uint8"), 1),
}
"""Bytes of an element, by the name that torch's recorder gives the dtype, in lower case."""


def group_name(entry: Entry) -> str:
    """Return the name of the process group; that of the default one is `DEFAULT_GROUP`."""
    name, description = entry["process_group"]
    return DEFAULT_GROUP if description == "default_pg" else str(name)


def group_in_process(entry: Entry) -> tuple[str, int]:
    """Return a backend, and the number of one of its groups in this process: each recorder has its own."""
    return str(entry.get("profiling_name", "")).partition(":")[0], entry["pg_id"]


def operation(entry: Entry) -> str:
    """Return the name of the operation, without that of the backend."""
    return str(entry.get("profiling_name", "?")).split(":")[-1]


def dtypes(entry: Entry) -> tuple[str, ...]:
    """Return the dtype of each input."""
    return tuple(str(dtype).lower() for dtype in entry.get("input_dtypes", ()))


def shapes(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each input."""
    return tuple(tuple(shape) for shape in entry.get("input_sizes", ()))


def num_bytes(entry: Entry) -> int | None:
    """Return the bytes of all inputs together, None if the size of a dtype is not known."""
    total = 0
    for dtype, shape in zip(dtypes(entry), shapes(entry), strict=False):
        size = 1 if dtype.startswith("float8") else _SIZES.get(dtype)
        if size is None:
            return None
        total += size * math.prod(shape)
    return total


def user_lines(entry: Entry, base: str) -> tuple[str, ...]:
    """Return the user's lines, `function() at file:line`, innermost first; none where there is no stack.

    Args:
        base: directory that files are named from.
    """
    frames = entry.get("frames") or ()
    return tuple(
        f"{frame['name']}() at {frame['filename'].removeprefix(f'{base}/')}:{frame['line']}"
        for frame in frames
        if not (is_installed(frame["filename"]) or frame["filename"] == "??")
    )


def phase(entry: Entry) -> str:
    """Return "backward", "optimizer", "forward" or "fixture", by the stack; "" where it says none of them."""
    if str(entry.get("thread_name", "")).startswith("pt_autograd"):  # of a GPU's backward
        return "backward"
    found = {_phase_of(frame) for frame in entry.get("frames") or ()}
    return next((name for name in ("backward", "optimizer", "forward", "fixture") if name in found), "")


# By the end of a file's name, and by a function of it. If one moves: the stack of a collective in that phase.
_PHASES = {
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward",
    ("torch/autograd/__init__.py", "backward"): "backward",
    ("torch/optim/optimizer.py", "wrapper"): "optimizer",
    ("torch/nn/modules/module.py", "_call_impl"): "forward",
    ("_pytest/fixtures.py", "call_fixture_func"): "fixture",
}


def _phase_of(frame: Mapping[str, Any]) -> str:
    file = "/".join(str(frame["filename"]).split("/")[-3:])
    for (end, function), name in _PHASES.items():
        if frame["name"] == function and (file.endswith(end) or str(frame["filename"]).endswith(end)):
            return name
    return ""
