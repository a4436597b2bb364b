"""The status of a rank: Python stacks of its threads, the collectives it has begun, stacks as it crashes."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pluggy
import torch
import torch.distributed as dist

import harness.properties
from harness.protocol import DEFAULT_GROUP, Issued, RankStatus, State
from harness.tracebacks import Stack, is_installed, parse

WIRE_THREAD = "lockstep-wire"
MOST_RECORDED = 256
"""Collectives that torch's flight recorder keeps: those of most tests. All are looked through on request."""
_DEFAULT_DESCRIPTION = "default_pg"
_OUR_PROPERTIES = str(Path(harness.properties.__file__).parent)


def describe_rank(
    stacks: dict[int, Stack],
    main_thread: int,
    base: str,
    begun: int,
    joined: int,
    state: State,
    case: str = "",
) -> RankStatus:
    """Describe all threads of this process but the one that asks, the main thread first.

    Args:
        stacks: of all threads, by ident.
        main_thread: its ident.
        base: directory that the user's files are named from.
        begun: when the item began, nanoseconds since the epoch.
        joined: when the rank joined its default group.
        state: "runs", "votes" or "idle".
        case: the subtest under way.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = _frames(stacks.get(main_thread, ()))
    texts = [f"MainThread:\n{_format(main)}"]
    for ident, stack in stacks.items():
        if ident != main_thread and names.get(ident) != WIRE_THREAD:
            texts.append(f"{names.get(ident, ident)}:\n{_format(_frames(stack))}")
    issued, before = issued_since(begun, joined)
    where, call = _users_line(main)
    if state == "runs" and main and _is_pytests(main[0].filename):
        state = "reports"
    return RankStatus("\n".join(texts), where.removeprefix(f"{base}/"), call, issued, before, state, case)


def progress() -> object:
    """Return what stays equal exactly while the main thread is blocked: how long it has run, and waited to.

    Frames are not looked at: those of a thread that runs cannot be walked through safely. Nothing is equal in
    `time.sleep`, which ends by itself, nor where the system does not tell.
    """
    if _sleeps_for_a_time():
        return object()
    try:
        return Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text()
    except OSError:
        return object()


def others_run_users_code(stacks: dict[int, Stack], main_thread: int) -> bool:
    """Whether a thread beside the main one and this one is in code of the user: it may free the main one."""
    apart = (main_thread, threading.get_ident())
    return any(_runs_users_code(stack) for ident, stack in stacks.items() if ident not in apart)


def _sleeps_for_a_time() -> bool:
    """Whether the main thread is in `time.sleep`, as far as the kernel tells."""
    with contextlib.suppress(OSError):
        return "nanosleep" in Path("/proc/self/wchan").read_text()
    return False


def _runs_users_code(stack: Stack) -> bool:
    return any(not is_installed(place.file) for place in stack)


def _frames(innermost_first: Stack) -> list[traceback.FrameSummary]:
    """Summarise a stack, outermost first, without the frames that lead to what pytest calls of the user's.

    Where pytest itself is at work, the first frame is one of pytest's.
    """
    linecache.checkcache()
    stack = [place.summary() for place in reversed(innermost_first)]
    last_of_pytest = max((i for i, frame in enumerate(stack) if _is_pytests(frame.filename)), default=-1)
    below = [frame for frame in stack[last_of_pytest + 1 :] if not _leads_to_property(frame.filename)]
    calls_user = any(not is_installed(frame.filename) for frame in below)
    return below if last_of_pytest < 0 or calls_user else stack[last_of_pytest:]


def _format(frames: list[traceback.FrameSummary]) -> str:
    return "".join(traceback.format_list(frames))


def _leads_to_property(filename: str) -> bool:
    """Whether a file is Hypothesis's or ours about it: dozens of frames between a test and its body."""
    hypothesis = sys.modules.get("hypothesis")
    theirs = str(Path(str(hypothesis.__file__)).parent) if hypothesis is not None else _OUR_PROPERTIES
    return filename.startswith((_OUR_PROPERTIES, theirs))


def _is_pytests(filename: str) -> bool:
    return "/_pytest/" in filename or filename.startswith(str(pluggy.__path__[0]))


def _users_line(frames: list[traceback.FrameSummary]) -> tuple[str, str]:
    """Name the innermost line that is neither an installed package's nor Python's, and what it has called."""
    called = ""
    for frame in reversed(frames):
        if not is_installed(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}", called
        called = frame.name if frame.name != "wrapper" else called  # torch wraps its collectives
    return (f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "?"), ""


def issued_since(begun: int, joined: int) -> tuple[tuple[Issued, ...], dict[str, int]]:
    """Return the collectives that this rank has begun since then, and each group's number of them before.

    Those from before the rank joined its default group do not count: they were of groups that are no more,
    one of which had the same name.

    Read from torch's flight recorder, which keeps the latest of all groups. A group whose last collective
    before `begun` it has forgotten is missing from the second value.
    """
    entries = _recorded()
    may_have_forgotten = len(entries) >= int(os.environ.get("TORCH_FR_BUFFER_SIZE", MOST_RECORDED))
    entries = [entry for entry in entries if entry["time_created_ns"] >= joined]
    generation = {_name(entry): entry["pg_id"] for entry in entries}  # a repaired group takes over a name
    entries = [entry for entry in entries if entry["pg_id"] == generation[_name(entry)]]
    news = [entry for entry in entries if entry["time_created_ns"] >= begun]
    before = {} if may_have_forgotten else dict.fromkeys(generation, 0)
    before |= {
        _name(entry): entry["collective_seq_id"] for entry in entries if entry["time_created_ns"] < begun
    }
    members = _members()
    return tuple(_issued(entry, members) for entry in news if not entry["is_p2p"]), before


def _recorded() -> list[dict[str, Any]]:
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"  # each backend has a recorder of its own
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json")
    try:
        entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
    except ValueError:  # a private format; without it a report tells stacks alone
        return []
    keys = {"pg_id", "process_group", "time_created_ns", "collective_seq_id", "is_p2p", "retired"}
    return [entry for entry in entries if entry.keys() >= keys]


def _issued(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> Issued:
    name = _name(entry)
    return Issued(
        group=name,
        ranks=members.get(name, ()),
        number=entry["collective_seq_id"],
        op=str(entry.get("profiling_name", "?")).split(":")[-1],
        dtypes=tuple(str(dtype).lower() for dtype in entry.get("input_dtypes", ())),
        shapes=tuple(tuple(shape) for shape in entry.get("input_sizes", ())),
        in_flight=not entry["retired"],
        timeout=entry.get("timeout_ms", float("inf")) / 1000,
    )


def _name(entry: dict[str, Any]) -> str:
    name, description = entry["process_group"]
    return DEFAULT_GROUP if description == _DEFAULT_DESCRIPTION else str(name)


def _members() -> dict[str, tuple[int, ...]]:
    # torch keeps no public list of groups; in this one a number stands for those of other ranks.
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    default = dist.group.WORLD
    return {
        DEFAULT_GROUP if group is default else group.group_name: tuple(sorted(ranks))
        for group, ranks in groups
        if isinstance(group, dist.ProcessGroup)
    }


class Stacks:
    """Takes stacks by Python's fault handler.

    Not by frame objects: on Python 3.11 the next frame of one that runs in another thread was seen to be a
    dict, and to crash the process, while torch's autograd engine was at work there.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("lockstep-stacks")
        self._taking = threading.Lock()

    def take(self) -> dict[int, Stack]:
        """Return the stack of each thread, by its ident."""
        with self._taking:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            faulthandler.dump_traceback(self._file, all_threads=True)
            text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return {thread.ident: thread.stack for thread in parse(text.decode(errors="replace"))}


class CrashReports:
    """Python's fault handler, as the harness needs it, however a test has left it.

    Args:
        stacks_path: where the controller looks for the stacks of a rank that it has sent SIGUSR1.
    """

    def __init__(self, stacks_path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._stacks = os.open(stacks_path, flags, 0o600)
        self._stderr = os.dup(2)  # not what pytest captures, which dies with the rank

    def enable(self) -> None:
        """Put both handlers in place, also where something else has taken the signal meanwhile."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._stderr)
