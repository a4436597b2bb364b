"""The open resources of a rank (child processes, threads, files and sockets, shared memory) and their guard.

The guard finds what a test has left open, and ends the processes among it. Memory that tests have freed is
given back.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import mmap
import multiprocessing
import operator
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from lockstep.exceptions import RankLeakWarning
from lockstep.features.leaks.multiprocessing_internals import (
    is_resource_sharer,
    reap_popens,
    service_processes,
)
from lockstep.process_tree import POLL_EVERY, adopt_orphans, children_of, end, is_running, with_descendants
from lockstep.tracebacks import is_installed

Policy = Literal["warn", "error", "off"]

SETTLE_WITHIN = 0.1
"""Seconds that something gets to end which a test has stopped but not waited for."""
TERMINATE_WITHIN = 0.2
"""Seconds between SIGTERM and SIGKILL for a process that was left."""
GROWTH = 64 * 2**20
"""Bytes by which a rank has grown when it gives back what tests have freed."""
_SEGMENTS = "/dev/shm"
_MAX_COMMAND = 120
"""Characters of a command line that are shown."""
# What torch starts once in a process and keeps to its end, by a piece of the command line.
_TORCH_PROCESSES = (
    "torch/_inductor/compile_worker",  # compiles kernels for all that is compiled later
    "torch_shm_manager",  # unlinks shared tensors when their last user is gone
)
# Threads that serve a process to its end, by the name of the thread or of its class.
_INFRASTRUCTURE = {
    "InductorSubproc",  # reads what torch's compile worker answers
    "InductorSubprocHealth",  # asks torch's compile worker whether it lives, from torch 2.15 on
    "InductorPool",  # compiles kernels; named so by features/compiles
    "TMonitor",  # tqdm's, one for all progress bars
    "destroys-groups",  # ours, of a group of gloo that never ends
    "waits-in-gloo",  # ours, for a collective that never ends
}


class LeakGuard:
    """Compares what a rank has open after a test's tear-down with what it had before the test's set-up.

    Args:
        policy: of the ini option `ranks_leaks`. Under "off" only processes are looked for; they are ended in
            any case.
    """

    warning: type[Warning] = RankLeakWarning

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._segments: set[str] = set()
        self._of_others: set[int | None] = set()
        self.baseline = OpenResources.capture_children()
        adopt_orphans()  # a process that outlives the one that the test started is the test's too
        if policy != "off":
            _record_segments(self._segments)

    def capture(self) -> OpenResources:
        return OpenResources.capture_children() if self._policy == "off" else OpenResources.capture()

    def before(self) -> None:
        self.baseline, self._of_others = self.capture(), _of_multiprocessing()

    def after(self, raised: bool) -> Sequence[str]:
        left = self.capture() - self.baseline
        if raised:  # a traceback keeps what a failed test had in its variables: all but processes
            left = OpenResources(left.children)
        if not left or not (left := self._settle(left)):
            return ()
        lines = left.describe(not _of_multiprocessing() <= self._of_others)
        end(self._new_children, TERMINATE_WITHIN)  # and whatever becomes a child of this rank as they end
        self._new_children()  # the last of them may have ended after the wait for it
        return lines

    def _settle(self, left: OpenResources) -> OpenResources:
        """Return what stays after a collection of garbage and a moment for what is about to end."""
        _reap(left.children)
        left = left.of_tests(self._segments)
        if left.threads or left.files or left.segments:
            gc.collect()
            left = left.of_tests(self._segments)
        until, opened = time.monotonic() + SETTLE_WITHIN, {fd: _link_of(fd) for fd in left.files}
        # Files, too: the thread that answers the controller opens and closes some at any time, one after the
        # other under the same number.
        while (left.children or left.threads or left.files) and time.monotonic() < until:
            time.sleep(POLL_EVERY)
            _reap(left.children)
            left = (left & self.capture()).of_tests(self._segments)
            left = left._replace(files=frozenset(fd for fd in left.files if _link_of(fd) == opened[fd]))
        return left

    def _new_children(self) -> set[int]:
        new = OpenResources.capture_children() - self.baseline
        _reap(new.children)
        return set(new.of_tests(self._segments).children)


def _record_segments(names: set[str]) -> None:
    """Add to `names` the segments that this process makes: /dev/shm has those of all processes."""
    make = shared_memory.SharedMemory.__init__

    @functools.wraps(make)
    def recorded(self: Any, name: str | None = None, create: bool = False, *args: Any, **kwargs: Any) -> None:
        make(self, name, create, *args, **kwargs)
        if create:
            names.add(self.name)

    shared_memory.SharedMemory.__init__ = recorded  # type: ignore[method-assign]


class OpenResources(NamedTuple):
    """The open resources of a process at one moment."""

    children: frozenset[int] = frozenset()
    threads: frozenset[threading.Thread] = frozenset()
    files: frozenset[str] = frozenset()
    """Numbers of descriptors, as the system writes them."""
    segments: frozenset[str] = frozenset()
    """Names in /dev/shm, of all processes."""

    @classmethod
    def capture(cls) -> OpenResources:
        return cls(_children(), frozenset(threading.enumerate()), _files(), _listing(_SEGMENTS))

    @classmethod
    def capture_children(cls) -> OpenResources:
        """Look for processes only."""
        return cls(_children())

    def __sub__(self, other: OpenResources) -> OpenResources:
        return OpenResources(*map(operator.sub, self, other))

    def __and__(self, other: OpenResources) -> OpenResources:
        return OpenResources(*map(operator.and_, self, other))

    def __bool__(self) -> bool:
        return any(self)

    def with_changes(self, before: OpenResources, after: OpenResources) -> OpenResources:
        """Return these with what was opened between two moments, and without what was closed."""
        return OpenResources(*map(operator.or_, self - (before - after), after - before))

    def of_tests(self, made: set[str]) -> OpenResources:
        """Leave out what has ended, what Python and torch keep to the end of the process, what others made.

        Args:
            made: names of the segments that this process has made.
        """
        of_torch = set(filter(_is_of_torch, self.children))
        # The pipes to its compile worker, of which the rank keeps both ends.
        pipes = {_link_of(fd, pid) for pid in of_torch for fd in _listing(f"/proc/{pid}/fd")}
        return OpenResources(
            frozenset(pid for pid in self.children - of_torch if is_running(pid)),
            frozenset(thread for thread in self.threads if thread.is_alive() and not is_service(thread)),
            frozenset(fd for fd in self.files if _name_of_file(fd) and _link_of(fd) not in pipes),
            frozenset(name for name in self.segments if _is_ours(name, made)),
        )

    def describe(self, has_forks: bool = False) -> list[str]:
        """Name each of them; processes with all that are below them.

        Args:
            has_forks: whether the test has left processes, too, that are children of the server of the ranks.
        """
        children = sorted(with_descendants(set(self.children)))
        threads = sorted(self.threads, key=lambda thread: thread.name)
        files = sorted(self.files, key=int)
        # Pipes lead to the processes, where any were left.
        files = [fd for fd in files if not ((self.children or has_forks) and "pipe:" in _name_of_file(fd))]
        return [
            *(f"process {pid} ({_title_of(pid)}), which was ended" for pid in children),
            *(f"thread {thread.name!r} (runs {_target_of(thread)})" for thread in threads),
            *(f"{_name_of_file(fd)}, open as descriptor {fd}" for fd in files),
            *(f"shared memory {_SEGMENTS}/{name}" for name in sorted(self.segments)),
        ]


class FreedMemory:
    """Gives the memory that tests have freed back to the system.

    Of one test of a ResNet, 0.7 GB stayed with each rank to the end of the run.
    """

    def __init__(self) -> None:
        # Of glibc; other allocators give back by themselves.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._figures: int | None = None
        with suppress(OSError):  # not every system has the file
            self._figures = os.open("/proc/self/statm", os.O_RDONLY)
        self._before = self._resident()

    @pytest.hookimpl(trylast=True)
    def pytest_ranks_finished(self) -> None:
        """Give memory back if this process has grown; it costs 1 ms, and more where there is much."""
        if self._trim is not None and self._resident() > self._before + GROWTH:
            gc.collect()  # models are full of cycles
            self._trim(0)
            self._before = self._resident()

    def _resident(self) -> int:
        """Return the bytes of memory that this process holds, 0 where that is not known; 2 µs."""
        if self._figures is None:
            return 0
        return int(os.pread(self._figures, 100, 0).split()[1]) * mmap.PAGESIZE


def _listing(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


# Processes


def _children() -> frozenset[int]:
    """Return the children of this process, and those of the server that multiprocessing forks some from."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none: the usual case costs one system call
        return frozenset()
    found = children_of(os.getpid())
    servers = {pid for pid, _ in service_processes() if pid is not None}
    forked = (children_of(pid) for pid in servers & found)
    return frozenset(found.union(*forked) - servers)


def _reap(pids: frozenset[int]) -> None:
    """Wait for those of the children that have ended; first by the modules that keep lists of them."""
    if not pids:
        return
    multiprocessing.active_children()
    reap_popens()
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _of_multiprocessing() -> set[int | None]:
    """Return the processes that multiprocessing has started, of which some are the server's children."""
    return {child.pid for child in multiprocessing.active_children()}


def _is_of_torch(pid: int) -> bool:
    command = _command_of(pid)
    return any(word in command for word in _TORCH_PROCESSES)


def _command_of(pid: int) -> str:
    """Return the whole command line of a process, empty if the process is gone."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def _title_of(pid: int) -> str:
    """Name a process: by the beginning of its command line, unless that is the one of this rank."""
    command = _command_of(pid) or "gone"
    if command == _command_of(os.getpid()):
        names = {child.pid: f"multiprocessing's {child.name}" for child in multiprocessing.active_children()}
        return names.get(pid, "a fork of this rank")
    return command if len(command) < _MAX_COMMAND else f"{command[:_MAX_COMMAND]}…"


# Threads


def is_service(thread: threading.Thread) -> bool:
    """Whether a thread is of no test: a native one that has run some Python, or one that serves all tests."""
    return (
        isinstance(thread, threading._DummyThread)
        or is_resource_sharer(thread)
        or not _INFRASTRUCTURE.isdisjoint((thread.name, type(thread).__name__))
    )


def _target_of(thread: threading.Thread) -> str:
    """Name the function that a thread runs, and its innermost line that is the user's, if there is one."""
    target = getattr(thread, "_target", None)  # deleted when it has run
    name = getattr(target, "__qualname__", type(thread).__qualname__)
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return name if frame is None else f"{name}, now at {frame.f_code.co_filename}:{frame.f_lineno}"


# Files and sockets


def _files() -> frozenset[str]:
    """Return the open descriptors, except for the one that listing them takes."""
    try:
        found = os.listdir("/proc/self/fd")
        mine = os.open("/", os.O_RDONLY)  # the lowest free number, as that of the listing was
    except OSError:
        return frozenset()
    os.close(mine)
    return frozenset(found) - {str(mine)}


def _link_of(number: str, process: int | str = "self") -> str:
    """Return what the system writes for a descriptor: a path, or the number of a pipe or socket."""
    with suppress(OSError):
        return os.readlink(f"/proc/{process}/fd/{number}")
    return ""


def _name_of_file(number: str) -> str:
    """Name what a descriptor stands for; empty if it is closed, or belongs to Python, torch or a driver."""
    try:
        path = os.readlink(f"/proc/self/fd/{number}")
        mode, flags = os.fstat(int(number)).st_mode, fcntl.fcntl(int(number), fcntl.F_GETFD)
    except OSError:
        return ""
    if any(str(pipe) == number for _, pipe in service_processes()):
        return ""
    # Python opens all but files so that an exec closes them; gloo and CUDA do not. Groups are in the state.
    native = not (stat.S_ISREG(mode) or flags & fcntl.FD_CLOEXEC)
    device = path.startswith("/dev/") and not path.startswith(_SEGMENTS)
    ours = path.startswith("/memfd:lockstep-shm") or path.endswith(
        ".lockstep-lease"
    )  # to the end of the rank
    if native or device or ours or path.startswith("anon_inode:"):
        return ""
    name = _name_of_socket(int(number)) if stat.S_ISSOCK(mode) else f"file {path}"
    # Of multiprocessing: sockets and memory that serve a process to its end.
    return "" if "/pymp-" in name or "/pym-" in name else name


def _name_of_socket(number: int) -> str:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        try:
            peer = f" to {_address(copy.getpeername())}"
        except OSError:
            peer = ""
        return f"socket {copy.family.name} {_address(copy.getsockname())}{peer}"
    return "socket"


def _address(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address) or "unnamed"


# Shared memory


def _is_ours(segment: str, made: set[str]) -> bool:
    """Whether this process has made a segment; torch writes the number of the process into the name."""
    ours = segment in made or segment.startswith(f"torch_{os.getpid()}_")
    return ours and os.path.exists(f"{_SEGMENTS}/{segment}")
