"""The status of a rank: the Python stacks of its threads, and the collectives it has begun."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pluggy

from lockstep.backends import BACKENDS
from lockstep.flight_entries import FlightRecord
from lockstep.process_tree import children_of
from lockstep.protocol import Issued, Probe, Progress, RankStatus, State
from lockstep.rank import pytest_internals
from lockstep.rank.flight_record import issued_since, keep_stack, read_record
from lockstep.rank.process_group import DefaultGroup
from lockstep.rank.torch_internals import build_locks
from lockstep.rank.wire import WIRE_THREAD
from lockstep.tracebacks import Stack, is_installed, parse


@dataclass(slots=True)
class Activity:
    """The item and the case that a rank is in: written by its main thread, read by the one that answers."""

    state: State = "idle"
    case: str = ""
    """The case of `run_subtests` under way, or the example of a property test."""
    count: str = ""
    """Number of the case, of how many."""
    meets_in: str = ""
    """Name of its last vote, "world.rebuild" say."""
    began: int = 0
    """Time at which the item began, nanoseconds since the epoch."""
    meeting: Issued | None = None
    """The last call of `init_process_group` in the item, for a group of all ranks."""
    item: int = 0
    """Number of the item in this world, the same on all ranks."""
    abortable: str = ""
    """The case in which the controller may abort the group; one that has ended has another group."""
    aborting: threading.Lock = field(default_factory=threading.Lock)
    """Held while the group is aborted, or `abortable` forgotten."""


class StatusReader:
    """Reads the status of this rank, on the thread that answers the controller.

    Args:
        activity: of the rank.
        group: its default process group.
        base: directory that the user's files are named from.
    """

    def __init__(self, activity: Activity, group: DefaultGroup, base: str) -> None:
        self.activity = activity
        self._group = group
        self._base = base
        self._stacks = Stacks()
        self._main = threading.main_thread().ident or 0
        self._main_clock = time.pthread_getcpuclockid(self._main)
        self._looked = (0.0, 0.0)
        self._progress: object = None
        self._blocked_since = math.inf
        self._keeps_stacks = False
        self._hidden: tuple[str, ...] = ()
        self._calls: dict[str, str] = {}
        self._parts: dict[str, Callable[[], object]] = {}
        self._of_pytest: tuple[str, ...] = (pytest_internals.FOLDER, str(pluggy.__path__[0]))

    def hide_frames(self, *folders: str) -> None:
        """Leave frames of these folders, which are between a test and its body, out of stacks from now on."""
        self._hidden = (*self._hidden, *folders)

    def count_as_pytest(self, folder: str) -> None:
        """Treat frames of a folder, which runs tests as pytest would, as pytest's own from now on."""
        self._of_pytest = (*self._of_pytest, folder)

    def name_call(self, function: str, call: str) -> None:
        """Describe a rank with a thread in a function of this name as in `call`, from now on."""
        self._calls[function] = call

    def add_part(self, feature: str, read: Callable[[], object]) -> None:
        """Give each status the part that `read` returns, on the thread that answers, if it is not false."""
        self._parts[feature] = read

    def answer(self, probe: Probe) -> RankStatus | Progress:
        """Return the status, or only that the main thread has run since the last time if that is so."""
        try:
            before, self._progress = self._progress, self._waits_in_meeting() or progress()
            if before != self._progress:
                self._blocked_since = time.monotonic()
            if not probe.full and self.activity.state != "runs":
                return self.collectives()
            if probe.full or (before == self._progress and not self._others_run_users_code()):
                return self._describe(probe.full)
            return self._place() if probe.names_place else Progress(self.activity.count)
        except Exception:  # of what torch does not document; the thread that answers is needed on
            return RankStatus(traceback.format_exc(), "an unknown place", state=self.activity.state)

    def collectives(self) -> RankStatus:
        """Return the collectives that this rank has begun in this test, and no more."""
        issued, before = issued_since(self.activity.began, self._group)
        activity = self.activity
        if activity.meeting is not None:
            issued = (activity.meeting, *issued)
        call = activity.meets_in if activity.state == "votes" else ""
        parts = {feature: part for feature, read in self._parts.items() if (part := read())}
        at = activity.state, activity.case, activity.count
        return RankStatus("", "", call, issued, before, *at, parts=parts)

    def _waits_in_meeting(self) -> Issued | None:
        """Return the call of `init_process_group` that the main thread is in, which polls a store there.

        None where this rank has child processes: one of them may come in place of another rank.
        """
        meeting = self.activity.meeting
        return meeting if meeting and meeting.in_flight and not children_of(os.getpid()) else None

    def _place(self) -> Progress:
        """Name the user's line that the main thread is at, at the cost of its stack alone."""
        ran, now = self._looked
        self._looked = time.clock_gettime(self._main_clock), time.monotonic()
        computes = self._looked[0] - ran > (self._looked[1] - now) / 2
        stack = self._stacks.take().get(self._main, ())
        where, call = _user_line([place.summary() for place in reversed(stack)])
        return Progress(self.activity.count, where.removeprefix(f"{self._base}/"), call, computes)

    def keep_stacks(self) -> None:
        """Let the record of shm have the line of each call, as torch's has, once the backend is loaded."""
        if not self._keeps_stacks:
            self._keeps_stacks = any(backend.observe(keep_stack) for backend in BACKENDS.values())

    def record(self) -> FlightRecord:
        """Return the calls of this test, with times and stacks."""
        return read_record(self.activity.began, self._group)

    def _describe(self, full: bool) -> RankStatus:
        """Describe all threads of this process but this one, the main thread first."""
        stacks = self._stacks.take()
        main = self._frames(stacks.pop(self._main, ()))
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads: list[tuple[object, list[traceback.FrameSummary]]] = [("MainThread", main)]
        for ident, stack in stacks.items():
            if names.get(ident) != WIRE_THREAD:
                threads.append((names.get(ident, ident), self._frames(stack)))
        texts = (f"{name}:\n{''.join(traceback.format_list(frames))}" for name, frames in threads)
        status = self.collectives()
        locks = build_locks() if full else ()
        where, call = _user_line(main)
        for function in self._calls.keys() & {frame.name for _, frames in threads for frame in frames}:
            call = self._calls[function]
        is_reporting = status.state == "runs" and main and self._is_of_pytest(main[0].filename)
        return replace(
            status,
            stacks="\n".join(texts),
            where=where.removeprefix(f"{self._base}/"),
            call=status.call or call,
            blocked=max(0.0, time.monotonic() - self._blocked_since),
            state="reports" if is_reporting else status.state,
            build_locks=locks,
            record=self.record() if full else None,
        )

    def _frames(self, innermost_first: Stack) -> list[traceback.FrameSummary]:
        """Summarise a stack, outermost first, without the frames that lead to the user's function.

        Where pytest itself is at work, the first frame is one of pytest's.
        """
        linecache.checkcache()
        stack = [place.summary() for place in reversed(innermost_first)]
        of_pytest = (i for i, frame in enumerate(stack) if self._is_of_pytest(frame.filename))
        last_of_pytest = max(of_pytest, default=-1)
        below = [
            frame for frame in stack[last_of_pytest + 1 :] if not frame.filename.startswith(self._hidden)
        ]
        calls_user = any(not is_installed(frame.filename) for frame in below)
        return below if last_of_pytest < 0 or calls_user else stack[last_of_pytest:]

    def _is_of_pytest(self, filename: str) -> bool:
        """Whether a file is pytest's, or of a folder that counts as pytest."""
        return any(folder in filename for folder in self._of_pytest)

    def _others_run_users_code(self) -> bool:
        """Whether a thread other than the main one and this one runs user code: it may free the main one."""
        apart = (self._main, threading.get_ident())
        stacks = [stack for ident, stack in self._stacks.take().items() if ident not in apart]
        return any(not is_installed(place.file) for stack in stacks for place in stack)


def progress() -> object:
    """Return a value that stays equal exactly while the main thread is blocked: its run time and wait time.

    Not from its frames: those of a thread that runs cannot be walked through safely. No two values are equal
    in `time.sleep`, which ends without help, and where the system has no such figures. A wait that wakes up
    by itself, as those of shm do to look for dead ranks, is a value of its own.
    """
    main = threading.main_thread()
    if wait := next(filter(None, (backend.wait_of(main) for backend in BACKENDS.values())), None):
        return wait
    waits_in = ""
    with contextlib.suppress(OSError):  # not every kernel shows it
        waits_in = Path("/proc/self/wchan").read_text()
    with contextlib.suppress(OSError):
        if "nanosleep" not in waits_in:
            return Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text()
    return object()


def _user_line(frames: list[traceback.FrameSummary]) -> tuple[str, str]:
    """Return the innermost line that is neither an installed package's nor Python's, and what it called."""
    called = ""
    for frame in reversed(frames):
        if not is_installed(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}", called
        called = frame.name if frame.name != "wrapper" else called  # torch wraps its collectives
    return (f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "?"), ""


class Stacks:
    """The stacks of all Python threads of this process, taken by the fault handler while they run.

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
