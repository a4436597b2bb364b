"""The open resources of a rank: child processes, threads, files and sockets, shared memory."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from harness.process_tree import children_of, is_running, with_descendants
from harness.rank.multiprocessing_internals import is_resource_sharer, reap_popens, service_processes
from harness.tracebacks import is_installed

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
    "TMonitor",  # tqdm's, one for all progress bars
}


_KINDS = ("children", "threads", "files", "segments")


@dataclass(frozen=True, slots=True)
class OpenResources:
    """The open resources of a process at one moment."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    files: frozenset[str]
    """Numbers of descriptors, as the system writes them."""
    segments: frozenset[str]
    """Names in /dev/shm, of all processes."""

    @classmethod
    def capture(cls) -> OpenResources:
        return cls(_children(), frozenset(threading.enumerate()), _files(), _listing(_SEGMENTS))

    @classmethod
    def capture_children(cls) -> OpenResources:
        """Look for processes only."""
        return cls(_children(), frozenset(), frozenset(), frozenset())

    def _combine(self, other: OpenResources, combine: Callable[..., Any]) -> OpenResources:
        return OpenResources(*(combine(getattr(self, kind), getattr(other, kind)) for kind in _KINDS))

    def __sub__(self, other: OpenResources) -> OpenResources:
        return self._combine(other, frozenset.difference)

    def __and__(self, other: OpenResources) -> OpenResources:
        return self._combine(other, frozenset.intersection)

    def __bool__(self) -> bool:
        return bool(self.children or self.threads or self.files or self.segments)

    def with_changes(self, before: OpenResources, after: OpenResources) -> OpenResources:
        """Return these with what was opened between two moments, and without what was closed."""
        return (self - (before - after))._combine(after - before, frozenset.union)

    def without_what_variables_hold(self) -> OpenResources:
        """Leave out all but processes: a traceback keeps what a failed test had in its variables."""
        return OpenResources(self.children, frozenset(), frozenset(), frozenset())

    def of_tests(self, made: set[str]) -> OpenResources:
        """Leave out what has ended, what Python and torch keep to the end of the process, what others made.

        Args:
            made: names of the segments that this process has made.
        """
        return OpenResources(
            frozenset(pid for pid in self.children if is_running(pid) and not _is_of_torch(pid)),
            frozenset(thread for thread in self.threads if thread.is_alive() and not _is_service(thread)),
            frozenset(fd for fd in self.files if _name_of_file(fd)),
            frozenset(name for name in self.segments if _is_ours(name, made)),
        )

    def describe(self) -> list[str]:
        """Name each of them; processes with all that are below them."""
        children = sorted(with_descendants(set(self.children)))
        threads = sorted(self.threads, key=lambda thread: thread.name)
        files = sorted(self.files, key=int)
        # Pipes lead to the processes, where any were left.
        files = [fd for fd in files if not (self.children and "pipe:" in _name_of_file(fd))]
        return [
            *(f"process {pid} ({_command_of(pid)}), which was ended" for pid in children),
            *(f"thread {_describe_thread(thread)}" for thread in threads),
            *(f"{_name_of_file(fd)}, open as descriptor {fd}" for fd in files),
            *(f"shared memory {_SEGMENTS}/{name}" for name in sorted(self.segments)),
        ]


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


def reap(pids: frozenset[int]) -> None:
    """Wait for those of the children that have ended; first by the modules that keep lists of them."""
    if not pids:
        return
    multiprocessing.active_children()
    reap_popens()
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _is_of_torch(pid: int) -> bool:
    return any(word in _command_of(pid) for word in _TORCH_PROCESSES)


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    if words == Path("/proc/self/cmdline").read_bytes():
        names = {child.pid: f"multiprocessing's {child.name}" for child in multiprocessing.active_children()}
        return names.get(pid, "a fork of this rank")
    text = words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return text if len(text) < _MAX_COMMAND else f"{text[:_MAX_COMMAND]}…"


# Threads


def _is_service(thread: threading.Thread) -> bool:
    """Whether a thread is of no test: a native one that has run some Python, or one that serves all tests."""
    return (
        isinstance(thread, threading._DummyThread)
        or is_resource_sharer(thread)
        or not _INFRASTRUCTURE.isdisjoint((thread.name, type(thread).__name__))
    )


def _describe_thread(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)  # deleted when it has run
    name = getattr(target, "__qualname__", type(thread).__qualname__)
    return f"{thread.name!r} (runs {name}{_place(sys._current_frames().get(thread.ident or 0))})"


def _place(frame: FrameType | None) -> str:
    """Name the innermost line that is the user's, if there is one."""
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f", now at {frame.f_code.co_filename}:{frame.f_lineno}"


# Files and sockets


def _files() -> frozenset[str]:
    """Return the open descriptors, except for the one that listing them takes."""
    try:
        found = os.listdir("/proc/self/fd")
        mine = os.open("/proc/self/fd", os.O_RDONLY)  # the lowest free number, as that of the listing was
    except OSError:
        return frozenset()
    os.close(mine)
    return frozenset(found) - {str(mine)}


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
    if native or device or path.startswith("anon_inode:"):
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


def _listing(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


def _is_ours(segment: str, made: set[str]) -> bool:
    """Whether this process has made a segment; torch writes the number of the process into the name."""
    ours = segment in made or segment.startswith(f"torch_{os.getpid()}_")
    return ours and os.path.exists(f"{_SEGMENTS}/{segment}")
