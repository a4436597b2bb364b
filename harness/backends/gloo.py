"""gloo: sockets between CPUs, or GPUs by way of their hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from time import monotonic  # as it is now: a test may replace that of the module
from typing import TYPE_CHECKING

from lockstep.backends.backend import Backend

if TYPE_CHECKING:
    import torch.distributed as dist

MOST_WAITING = 8
"""Most groups that have ended and are kept for their destructors to run together. Each wakes up 100 times a
second."""
_DESTROYED_WITHIN = 1.0
"""Seconds; what is in flight fails at once, as its connections are closed."""


class Gloo(Backend):
    name = "gloo"
    devices = ("cpu", "cuda")
    takes_devices = False
    connects = True
    broken_connection = (
        r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused)"
    )

    def prepare(self) -> None:
        """Let no thread that this process will have take the core of the one that wakes it.

        A thread of gloo that sends holds a lock, which gloo's event loop tries again and again without a
        pause. What the send wakes would run in place of the sender, while the loop spins: seen in torch 2.13,
        37 calls of epoll_wait for each write, of which 2 remain, and a small all-gather takes a third of the
        time.
        """
        with contextlib.suppress(AttributeError, OSError):  # not on every system, nor in every sandbox
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def close_connections(self) -> None:
        for fd in _connections():
            # A peer may shut it down first; another thread may close it.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def detach(self) -> None:
        """Replace the child's descriptors: else this rank's death shows only once the child ends."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in _connections():
            os.dup2(null, fd)
        os.close(null)

    def release(self, *lists: list[dist.ProcessGroup]) -> None:
        """Run the destructors of groups, those of different lists at one time, in threads.

        A destructor waits for gloo's event loop, which turns every 10 ms where nothing happens, and for the
        group's collectives. One whose connection was closed just as it began to send never ends:
        `UnboundBuffer::waitSend`, seen in torch 2.13, once in about 20 cases.
        """
        destructors = [
            threading.Thread(target=groups.clear, name="destroys-groups", daemon=True) for groups in lists
        ]
        for destructor in destructors:
            destructor.start()
        until = monotonic() + _DESTROYED_WITHIN
        for destructor in destructors:
            destructor.join(max(until - monotonic(), 0))


def _connections() -> Iterator[int]:
    """Yield the descriptor of every connection that gloo has open in this process.

    They differ from Python's in that gloo leaves its sockets open across exec.
    """
    try:
        descriptors = [*map(int, os.listdir("/dev/fd"))]
    except OSError:  # without /proc, into which it is a link
        descriptors = [*range(min(os.sysconf("SC_OPEN_MAX"), 1 << 16))]
    for fd in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode) or fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                copy.getpeername()
                is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        except OSError:  # not connected, or closed by now: the directory's own descriptor is
            continue
        if is_tcp:
            yield fd
