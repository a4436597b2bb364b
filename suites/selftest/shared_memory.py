"""The names in /dev/shm, which has those of all processes: of tests beside this one too."""

from __future__ import annotations

import os
import time


def names_in_shared_memory() -> set[str]:
    """Return the names in /dev/shm; without semaphores of multiprocessing, which others make at any time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def left_in_shared_memory(before: set[str], seconds: float = 20) -> list[str]:
    """Return new files of /dev/shm; those that come and go are of others who test at the same time."""
    deadline = time.monotonic() + seconds
    new = names_in_shared_memory() - before
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= names_in_shared_memory()
    return [f"/dev/shm/{name}" for name in sorted(new)]
