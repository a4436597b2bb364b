"""Flight records as files `fr_trace_<rank>` that `torchfrtrace` reads. In the controller; without torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.features.timeline.timeline import Timeline
from lockstep.flight_entries import group_name

PREFIX = "fr_trace_"
VERSION = "2.10"
"""Version of the format, as torch 2.13 writes it. If it moves: `version` in what `_dump_fr_trace` returns."""
_ENDED = "completed"


def write_flight_files(timeline: Timeline, folder: Path) -> None:
    """Write one file for each rank with a record.

    What torch leaves out on gloo is added, as its analysis needs it: members of groups, and that a collective
    has ended.

    Raises:
        OSError: a file cannot be written.
    """
    groups = _groups(timeline)
    for rank, record in timeline.records.items():
        dump = {
            "version": VERSION,
            "pg_config": {name: group for name, group in groups.items() if str(rank) in _members(group)},
            "pg_status": {},
            "entries": [_entry(entry) for entry in record.entries],
        }
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump))


def _groups(timeline: Timeline) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for record in timeline.records.values():
        for entry in record.entries:
            name, description = map(str, entry["process_group"])
            ranks = list(timeline.members(group_name(entry)))
            found[name] = {"name": name, "desc": description, "ranks": str(ranks)}
    return found


def _members(group: Mapping[str, str]) -> list[str]:
    return group["ranks"].strip("[]").split(", ")


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    is_over = bool(entry["retired"]) and not entry.get("failed")
    state = _ENDED if is_over else entry["state"]
    return {"frames": [], **entry, "state": state, "process_group": tuple(entry["process_group"])}


def remove_flight_files(folder: Path) -> None:
    """Remove those of an earlier run of the test."""
    for path in folder.glob(f"{PREFIX}*"):
        path.unlink()
