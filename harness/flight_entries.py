"""Reading of one entry of a flight record: group, operation, dtypes and shapes.

Used on both sides; standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.protocol import DEFAULT_GROUP

Entry = Mapping[str, Any]
"""One call, with the keys of torch's flight recorder."""


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
