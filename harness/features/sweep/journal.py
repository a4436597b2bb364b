"""Journals of what ranks write and sync, in files that outlive them, and the loss of what was not synced.

Used on both sides; standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class Journal:
    """The operations of one rank on files, in a file: the kernel keeps it whatever happens to the process."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    def note(self, op: str, path: str, target: str) -> None:
        size = 0
        with suppress(OSError):
            size = os.stat(target or path).st_size
        line = json.dumps([time.time_ns(), op, path, target, size])
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


def lose_unsynced(journals: Iterable[Path]) -> list[str]:
    """Cut files to what was synced of them; return their paths.

    A file keeps the first bytes, as many as it had when it was synced last. What was overwritten in place
    stays, and so do renames and removals, which a real loss of power may undo.
    """
    lines = [line for path in journals for line in path.read_text().splitlines()]
    synced: dict[str, int] = {}
    unsynced: dict[str, None] = {}
    for _, op, path, target, size in sorted(json.loads(line) for line in lines):
        match op:
            case "open":
                synced.setdefault(path, size)
                synced[path] = min(size, synced[path])
            case "write" | "truncate":
                unsynced[path] = None
            case "fsync":
                synced[path] = size
            case "rename":
                synced[target] = synced.pop(path, size)
                if path in unsynced:
                    del unsynced[path]
                    unsynced[target] = None
                else:
                    unsynced.pop(target, None)
    lost = []
    for path in unsynced:
        size = synced.get(path, 0)
        with suppress(OSError):  # it was removed since
            if os.stat(path).st_size > size:
                os.truncate(path, size)
                lost.append(path)
    return lost
