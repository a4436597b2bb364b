"""The flight record of this rank: its calls in a test, with times and stacks. Imports torch."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from harness.protocol import DEFAULT_GROUP, FlightRecord
from harness.rank import pytest_internals
from harness.rank.torch_internals import group_members, recorded_calls
from harness.timeline.entries import group_name
from lockstep.names import loaded

MOST = 256
"""Calls of a record: what torch's flight recorder keeps by default."""


def read_record(began: int, before: dict[str, int]) -> FlightRecord:
    """Return the calls of this rank since then, of groups that are gone as well.

    Args:
        began: nanoseconds since the epoch.
        before: by group, how many collectives it had seen by then, where that is known.
    """
    entries, shm = recorded_calls(), loaded("shm")
    if shm is not None and (own := shm.record()):
        entries = sorted(entries + own, key=lambda entry: entry["time_created_ns"])
    entries = [entry for entry in entries if entry["time_created_ns"] >= began][-MOST:]
    for entry in entries:
        if frames := entry.get("frames"):
            entry["frames"] = _without_pytest(frames)
    default = dist.group.WORLD
    groups = {
        DEFAULT_GROUP if group is default else group.group_name: ranks for group, ranks in group_members()
    }
    seen = {group_name(entry) for entry in entries}
    groups = {name: ranks for name, ranks in groups.items() if name in seen}
    return FlightRecord(tuple(entries), groups, before, began, time.time_ns())


def _without_pytest(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a stack, innermost first, up to the first frame of pytest's: it says what called the user."""
    for number, frame in enumerate(frames):
        if pytest_internals.FOLDER in frame["filename"]:
            return frames[: number + 1]
    return frames
