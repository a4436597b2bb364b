"""Processes below one: found by /proc, and ended with all that they have started.

Used by the controller, the server and the ranks; standard library only. Where a system has no /proc there is
nothing to be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
POLL_EVERY = 0.002
"""Seconds. Only a child of this process can be waited for without polling."""
END_WITHIN = 2.0
"""Seconds that killed processes get to vanish; only one that the kernel cannot end takes longer."""


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose parent ends, instead of the system's first."""
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """Return the children of a process, zombies too; empty if it is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def with_descendants(pids: set[int]) -> set[int]:
    """Return the processes and all that are below them."""
    found, new = set(pids), pids
    while new:
        new = set().union(*map(children_of, new)) - found
        found |= new
    return found


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on; none where there is no process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def start_of(pid: int) -> str:
    """Return when a process started, in the kernel's ticks since it booted, a process not waited for too.

    With its number this names a process for ever; it is "" where there is no such process, or no /proc.
    """
    stat = stat_of(pid)
    return stat[19] if stat else ""  # "starttime"


def kill_group(leader: int, began: str) -> None:
    """Kill the processes of a group, whether its leader lives or has ended; nothing where that is another.

    Args:
        began: `start_of` the leader, "" where it is not known.
    """
    if not began or start_of(leader) in ("", began):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; one that was not waited for yet (a zombie) has."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def end(roots: Callable[[], set[int]], patience: float) -> None:
    """End processes with everything below them: SIGTERM, and after `patience` seconds SIGKILL.

    Args:
        roots: finds the topmost of them; called again and again, because orphans come up in their place.
        patience: seconds between the two signals; 0 sends the second one only.
    """
    signalled: set[int] = set()
    start = time.monotonic()
    while (alive := {pid for pid in with_descendants(roots()) if is_running(pid)}) and (
        waited := time.monotonic() - start
    ) < patience + END_WITHIN:
        kills = waited >= patience
        for pid in alive if kills else alive - signalled:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if kills else signal.SIGTERM)
        signalled |= alive
        time.sleep(POLL_EVERY)
