"""Flight records: the calls of a rank, and the group, operation, dtypes and shapes of one.

Used on both sides; standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
"""One call, with the keys of torch's flight recorder."""
DEFAULT_GROUP = "the default group"
"""Name of the default process group in messages; others go by torch's names."""


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The calls of a rank in a test, with times and stacks: what a timeline is made of."""

    entries: tuple[dict[str, Any], ...]
    """The latest ones, oldest first, in the shape of torch's flight recorder: `frames` are the user's alone,
    and `phase` says what called them."""
    groups: dict[str, tuple[int, ...]]
    """Members of the groups that the rank is in, by torch's name."""
    before: dict[str, int]
    """Number of collectives that each group had seen when the test began."""
    began: int
    """Time at which the test began, nanoseconds since the epoch."""
    taken: int
    """Time at which this was read, likewise."""
    joins: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Times at which the rank joined each default group of the test, oldest first, and the ranks of it, by
    the numbers that they had when the test began: as all ranks are numbered here."""


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
