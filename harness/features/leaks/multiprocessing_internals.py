"""Private names of multiprocessing and subprocess that a rank uses. Seen in Python 3.11 to 3.14.

Runs inside a rank; standard library only.
"""

from __future__ import annotations

import subprocess
import threading
from multiprocessing import forkserver, resource_sharer, resource_tracker
from typing import Any


def service_processes() -> list[tuple[int | None, int | None]]:
    """Return the processes that multiprocessing starts once for all, each with the pipe that keeps it alive.

    If they move: what `resource_tracker.ensure_running` and `forkserver.ensure_running` start.
    """
    tracker: Any = resource_tracker
    server: Any = forkserver
    tracker, server = tracker._resource_tracker, server._forkserver
    return [(tracker._pid, tracker._fd), (server._forkserver_pid, server._forkserver_alive_fd)]


def is_resource_sharer(thread: threading.Thread) -> bool:
    """Whether a thread is multiprocessing's, which serves descriptors once one was sent."""
    sharer: Any = resource_sharer
    return thread is sharer._resource_sharer._thread


def reap_popens() -> None:
    """Wait for ended processes whose `subprocess.Popen` is gone. If it moves: what `Popen()` does first."""
    subprocess._cleanup()  # type: ignore[attr-defined]
