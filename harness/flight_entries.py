"""Reading of one entry of a flight record: group, operation, bytes, the user's lines.

Used on both sides; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.protocol import DEFAULT_GROUP

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
    return tuple([str(dtype).lower() for dtype in entry.get("input_dtypes", ())])


def shapes(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each input."""
    return tuple([tuple(shape) for shape in entry.get("input_sizes", ())])


def num_bytes(dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> int | None:
    """Return the bytes of all inputs together, None if the size of a dtype is not known."""
    total = 0
    for dtype, shape in zip(dtypes, shapes, strict=False):
        size = 1 if dtype.startswith("float8") else _SIZES.get(dtype)
        if size is None:
            return None
        total += size * math.prod(shape)
    return total


def user_lines(entry: Entry, base: str) -> tuple[str, ...]:
    """Return the user's lines, `function() at file:line`, innermost first; none where there is no stack.

    Args:
        base: directory that files are named from, with a slash at its end.
    """
    return tuple(
        f"{frame['name']}() at {frame['filename'].removeprefix(base)}:{frame['line']}"
        for frame in entry.get("frames") or ()
    )
