"""The calls of this rank as torch's flight recorder, and that of shm, have them. Imports torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep.backends import BACKENDS
from lockstep.bounds import shown
from lockstep.flight_entries import (
    DEFAULT_GROUP,
    Entry,
    FlightRecord,
    dtypes,
    group_in_process,
    group_name,
    operation,
    shapes,
)
from lockstep.protocol import Issued
from lockstep.rank import pytest_internals
from lockstep.rank.torch_internals import phases_by_code, recorded_calls, recorded_collectives
from lockstep.tracebacks import is_installed

if TYPE_CHECKING:
    from lockstep.rank.process_group import DefaultGroup

MAX_RECORDED = 256
"""Calls that torch's flight recorder keeps: those of most tests. Each status reads all of them."""


def limit_records() -> int:
    """Return how many calls torch's flight recorder keeps, which it reads from the environment."""
    most = os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(MAX_RECORDED))
    if not most.isdecimal() or len(most) > 9:
        problem = f"TORCH_FR_BUFFER_SIZE={shown(most)}"
        raise ValueError(f"{problem}: set it to the number of calls that torch records, or not at all")
    return int(most)


def issued_since(began: int, group: DefaultGroup) -> tuple[tuple[Issued, ...], dict[str, int]]:
    """Return the collectives that this rank has begun since then, and each group's number of them before.

    Those of groups that are gone, or hidden, do not count: one of them has the same name.

    Read from torch's flight recorder, which keeps the latest of all groups, and from that of shm. A group
    whose last collective before `began` is forgotten there is missing from the second value.
    """
    recorded = _Recorded.read(recorded_collectives)
    current = recorded.current(group.has_begun)
    news = [entry for entry in current if entry["time_created_ns"] >= began and not entry["is_p2p"]]
    members = _members(group)
    return tuple(_issued(entry, members) for entry in news), recorded.before(current, began)


def read_record(began: int, group: DefaultGroup) -> FlightRecord:
    """Return the calls of this rank since then, with times and stacks; of groups that are gone as well.

    Args:
        began: nanoseconds since the epoch.
        group: that of the rank now.
    """
    recorded = _Recorded.read(recorded_calls)
    before = recorded.before(recorded.current(group.has_begun), began)
    entries = [entry for entry in recorded.entries if entry["time_created_ns"] >= began][-MAX_RECORDED:]
    stacks = StackReader(phases_by_code())
    for entry in entries:
        stacks.shorten(entry)
    seen = {group_name(entry) for entry in entries}
    groups = {name: ranks for name, ranks in _members(group).items() if name in seen}
    return FlightRecord(tuple(entries), groups, before, began, time.time_ns(), tuple(group.joins))


@dataclass(frozen=True)
class _Recorded:
    """The latest calls of this process, oldest first."""

    entries: list[dict[str, Any]]
    is_whole: bool
    """True if none is forgotten yet."""

    @classmethod
    def read(cls, of_torch: Callable[[], list[dict[str, Any]]]) -> _Recorded:
        entries = of_torch()
        own = [entry for backend in BACKENDS.values() for entry in backend.record()]
        most = int(os.environ.get("TORCH_FR_BUFFER_SIZE", MAX_RECORDED))
        is_whole = max(len(entries), len(own)) < most
        if own:
            entries = sorted(entries + own, key=lambda entry: entry["time_created_ns"])
        return cls(entries, is_whole)

    def current(self, is_current: Callable[[int], bool]) -> list[dict[str, Any]]:
        """Return the calls of the groups that this rank has now."""
        # By group, too: one that is kept, or lent, for an adopted test has collectives from before.
        current = {group_in_process(each) for each in self.entries if is_current(each["time_created_ns"])}
        entries = [entry for entry in self.entries if group_in_process(entry) in current]
        # A repaired group takes over a name.
        latest = {group_name(entry): group_in_process(entry) for entry in entries}
        return [entry for entry in entries if group_in_process(entry) == latest[group_name(entry)]]

    def before(self, current: list[dict[str, Any]], began: int) -> dict[str, int]:
        """Return by group how many collectives it had seen by then, where that is known."""
        names = {group_name(entry) for entry in current}
        return (dict.fromkeys(names, 0) if self.is_whole else {}) | {
            group_name(entry): entry["collective_seq_id"]
            for entry in current
            if entry["time_created_ns"] < began and not entry["is_p2p"]  # which have a number of their own
        }


def _members(group: DefaultGroup) -> dict[str, tuple[int, ...]]:
    default = dist.group.WORLD
    return {DEFAULT_GROUP if each is default else each.group_name: ranks for each, ranks in group.members()}


def _issued(entry: Entry, members: dict[str, tuple[int, ...]]) -> Issued:
    name = group_name(entry)
    return Issued(
        group=name,
        ranks=members.get(name, ()),
        number=entry["collective_seq_id"],
        op=operation(entry),
        dtypes=dtypes(entry),
        shapes=shapes(entry),
        in_flight=not entry["retired"],
        timeout=entry.get("timeout_ms", float("inf")) / 1000,
    )


def keep_stack(entry: Any) -> None:
    """Note the stack of the call of shm that begins: as an observer, where the test has a timeline."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        entry.frames.append({"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno})
        frame = None if code.co_name in _OUTERMOST else frame.f_back


_OUTERMOST = ("pytest_pyfunc_call", "pytest_fixture_setup")
"""The hooks of pytest's that call the user's functions."""


class StackReader:
    """Replaces the stack of a call by what a timeline shows of it.

    Args:
        phases: by file and name of a function of torch, the phase of a step that it runs.
    """

    ORDER = ("backward", "optimizer", "forward", "fixture")
    """A module that runs in backward, as a checkpoint does, is in backward."""

    def __init__(self, phases: dict[tuple[str, str], str]) -> None:
        self._phases = phases
        self._is_users: dict[str, bool] = {}

    def shorten(self, entry: dict[str, Any]) -> None:
        """Leave the user's frames in a call, and say which phase it is in, "" if the stack shows none."""
        found = {"backward"} if str(entry.get("thread_name", "")).startswith("pt_autograd") else set()
        frames = []
        for frame in entry.get("frames") or ():
            file, function = frame["filename"], frame["name"]
            if (is_users := self._is_users.get(file)) is None:
                is_users = self._is_users[file] = not (is_installed(file) or file == "??")
            if is_users:
                frames.append(frame)
            elif phase := self._phases.get((file, function)):
                found.add(phase)
            elif pytest_internals.FOLDER in file:
                if function == "pytest_fixture_setup":
                    found.add("fixture")
                if function in _OUTERMOST:
                    break
        entry["frames"] = frames
        entry["phase"] = next((name for name in self.ORDER if name in found), "")
