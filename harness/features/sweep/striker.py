"""The moments of a rank in a sweep: recorded in one run, met by a fault in others. Inside a rank."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch.distributed as dist

from lockstep.exceptions import InjectedFault
from lockstep.features.injection.calls import INTERCEPTION, NO_CODE, Call, Run, caller
from lockstep.features.sweep.files import FileCalls
from lockstep.features.sweep.journal import Journal
from lockstep.features.sweep.points import COLLECTIVE, END, FILE_OPS, Point, Spot

__tracebackhide__ = True  # under pytest a failure points to the call

Contents = dict[str, tuple[int, int]]
"""Size and time of each file, by path."""


@dataclass
class Recording:
    """The undisturbed run of a rank."""

    spots: list[Spot] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    """The group of each moment, "" of one that is no collective."""
    threads: dict[str, set[int]] = field(default_factory=dict)
    """Threads that have used each group."""
    touched: set[str] = field(default_factory=set)
    appeared: dict[int, frozenset[str]] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    seconds_of_looks: float = 0.0
    """Time in which the files were looked at, which is none of the function's."""

    def contended(self) -> tuple[Spot, ...]:
        """Return the moments, with those marked at which two threads use one group."""
        pairs = zip(self.spots, self.groups, strict=True)
        return tuple(
            replace(spot, is_contended=len(self.threads.get(group, ())) > 1) for spot, group in pairs
        )


class Striker:
    """Sees collectives and operations on files of this rank, and disturbs it at one of them.

    Args:
        rank: number of this rank.
        roots: directories of the files.

    Attributes:
        has_struck: whether the fault has made a difference.
        has_read: whether something was looked at below the directories.
        processes: numbers of the processes of all ranks.
        lag: seconds by which a late rank is late.
    """

    def __init__(self, rank: int, roots: Sequence[str]) -> None:
        self._rank, self._roots = rank, tuple(roots)
        self._files = FileCalls(roots, self)
        self._mode: Literal["off", "records", "strikes"] = "off"
        self._lock = threading.Lock()
        self._begun = threading.Condition()
        self._by_thread: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[str] = Counter()
        self._after = ""
        self._recording = Recording()
        self._point: Point | None = None
        self._journal: Journal | None = None
        self._visible: set[str] | None = None
        self._visible_until = 0.0
        self.has_struck = self.has_read = False
        self.processes: tuple[int, ...] = ()
        self.lag = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See what happens inside; nothing is recorded or disturbed by itself."""
        with ExitStack() as stack:
            stack.callback(INTERCEPTION.forget)
            stack.enter_context(INTERCEPTION.layer(self._run))
            stack.enter_context(self._files.installed())
            yield

    @contextmanager
    def records(self) -> Iterator[Recording]:
        """Record the moments of what runs inside."""
        self._recording = recording = Recording(contents=self._look())
        self._begin("records")
        try:
            yield recording
            self._reach(END, lambda: "the end")
        finally:
            self._mode = "off"

    @contextmanager
    def strikes(self, point: Point, journal: str) -> Iterator[None]:
        """Disturb what runs inside at a point, if it is of this rank.

        Args:
            journal: path of the file of what was written and not synced.
        """
        self._point = point
        self.has_struck = False
        if point.kind == "power":
            self._journal = Journal(journal)
        self._begin("strikes")
        try:
            yield
            self._reach(END, lambda: "the end")
        finally:
            self._mode, self._visible = "off", None
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _begin(self, mode: Literal["records", "strikes"]) -> None:
        self._counts.clear()
        self._by_thread.clear()
        self._after = ""
        self._mode = mode

    # Collectives

    def _run(self, call: Call, run: Run) -> dist.Work | None:
        if self._mode == "off":
            return run(call.written, call.read)
        group = call.group.group_name
        self._reach(COLLECTIVE, lambda: _title(call), group=group)
        work = run(call.written, call.read)
        with self._begun:
            self._by_thread[group, threading.get_ident()] += 1
            self._begun.notify_all()
        return work

    def _await_another_thread(self, group: str) -> None:
        """Wait until another thread has begun a collective of the group; not for long, as it may not."""

        def of_others() -> int:
            own = self._by_thread[group, threading.get_ident()]
            return sum(count for (name, _), count in self._by_thread.items() if name == group) - own

        with self._begun:
            before = of_others()
            self.has_struck = self._begun.wait_for(lambda: of_others() > before, self.lag)

    # Files; see `Observer`

    def before(self, op: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        if self._mode != "off":
            self._reach(op, lambda: f"{op} of {self._name(path)}", half, path=path)

    def after(self, op: str, path: str, target: str) -> None:
        if self._mode == "records":
            self._recording.touched |= {each for each in (path, target) if each}
        elif self._journal is not None:
            self._journal.note(op, path, target)
        if self._visible is not None:
            self._visible |= {path, target}

    def reads(self, path: str) -> None:
        self.has_read = True

    def hides(self, path: str) -> bool:
        visible = self._visible
        if visible is None or path in visible or time.monotonic() >= self._visible_until:
            return False
        is_there = os.path.lexists(path)
        self.has_struck |= is_there
        return is_there

    def _name(self, path: str) -> str:
        root = next((root for root in self._roots if path.startswith(f"{root}/")), "")
        return os.path.relpath(path, root) if root else os.path.basename(path)

    def _look(self) -> Contents:
        """Return all files that there are."""
        found = {}
        with self._files.unseen():
            for folder, _, names in (each for root in self._roots for each in os.walk(root)):
                for name in names:
                    path = f"{folder}/{name}"
                    with suppress(FileNotFoundError):  # another rank removes it
                        status = os.lstat(path)
                        found[path] = status.st_size, status.st_mtime_ns
        return found

    # Moments

    def _reach(
        self,
        op: str,
        describe: Callable[[], str],
        half: Callable[[], object] = lambda: None,
        group: str = "",
        path: str = "",
    ) -> None:
        with self._lock:
            place = self._counts.total()
            self._counts[op] += 1
            number = self._counts[op]
            if self._mode == "records":
                self._record(op, number, place, describe(), group)
                return
            point = self._point
            wanted = (point.rank, point.op, point.number) if point is not None else None
            if wanted != (self._rank, op, number):
                return
        assert point is not None
        self._strike(point, group, half, path)

    def _record(self, op: str, number: int, place: int, text: str, group: str) -> None:
        line = "" if op == END else caller()
        text += f" at {line}" if line not in ("", NO_CODE) else ""
        if self._after:
            text += f"; after {self._after}"
        if op in FILE_OPS:
            self._after = text.partition(" at ")[0]
        recording, begun = self._recording, time.monotonic()
        now = self._look()
        recording.seconds_of_looks += time.monotonic() - begun
        if changed := {path for path, each in now.items() if recording.contents.get(path) != each}:
            recording.appeared[place] = frozenset(changed)
        recording.contents = now
        if group:
            recording.threads.setdefault(group, set()).add(threading.get_ident())
        recording.groups.append(group)
        recording.spots.append(Spot(self._rank, op, number, place, text))

    def _strike(self, point: Point, group: str, half: Callable[[], object], path: str) -> None:
        self.has_struck = point.kind not in ("invisible", "order")
        match point.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "torn":
                half()
                os.kill(os.getpid(), signal.SIGKILL)
            case "all" | "power":
                for process in self.processes:
                    if process != os.getpid():
                        os.kill(process, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail" if path:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected)", path)
            case "fail":
                raise InjectedFault(f"injected before {point.op} {point.number}")
            case "full":
                half()
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)", path)
            case "delay":
                time.sleep(self.lag)
            case "invisible":
                self._visible_until = time.monotonic() + self.lag
                self._visible = {*self._roots, *self._look(), *self._folders()}
            case "order":
                self._await_another_thread(group)

    def _folders(self) -> set[str]:
        with self._files.unseen():
            return {folder for root in self._roots for folder, _, _ in os.walk(root)}


def _title(call: Call) -> str:
    size = f" of {call.about.nbytes} B" if call.about.nbytes else ""
    return f"{call.about.op}{size}{call.phase()}"
