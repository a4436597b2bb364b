"""The folder of `--rank-output-dir`: everything that ranks print, in full, a folder for each test.

Ranks write what pytest has captured; the controller adds what dead and hung ones left. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from pathlib import Path

from harness.exceptions import WorldError

OUTSIDE = "outside-of-tests"
"""The folder of what ranks print before, between and after tests, a folder for each controller and world."""
MOST_OF_A_NAME = 120
"""Bytes. File systems take 255."""


class OutputDirectory:
    """Where the output of each test and world goes.

    Args:
        path: absolute path of the folder; it need not exist.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def of_test(self, nodeid: str) -> Path:
        """Return the folder of a test: its file, class and name, each made safe for any file system."""
        file, _, names = nodeid.partition("::")
        name, bracket, parameters = names.partition("[")  # parameters may hold anything
        *classes, name = name.split("::")
        return self._path.joinpath(*map(_safe, (*file.split("/"), *classes, name + bracket + parameters)))

    def clear(self, nodeid: str) -> None:
        """Remove what ranks have written for this test before.

        Raises:
            WorldError: it cannot be removed.
        """
        for path in self.of_test(nodeid).glob("rank-*.*"):
            try:
                path.unlink()
            except OSError as error:
                raise WorldError(f"--rank-output-dir: an earlier run's output cannot go: {error}") from None

    def add(self, nodeid: str, rank: int, kind: str, text: str) -> Path:
        """Append `text` to the test's file `rank-<rank>.<kind>`, and return that file.

        Raises:
            OSError: it cannot be written.
        """
        return self._write(nodeid, f"rank-{rank}.{_safe(kind)}", text, "a")

    def replace(self, nodeid: str, rank: int, kind: str, text: str) -> Path:
        """Write `text` as the whole of that file. Raises as `add` does."""
        return self._write(nodeid, f"rank-{rank}.{_safe(kind)}", text, "w")

    def _write(self, nodeid: str, name: str, text: str, mode: str) -> Path:
        path = self.of_test(nodeid) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        return path

    def keep_log(self, controller: str, world: str, log: Path) -> None:
        """Copy a rank's log, what it wrote outside of tests, unless it is empty or cannot be copied."""
        with contextlib.suppress(OSError):  # the world is at its end, and nobody is left to tell
            if log.stat().st_size:
                folder = self._path / OUTSIDE / controller / world
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, folder / log.name)

    def clear_logs(self, controller: str) -> None:
        """Remove the logs that a controller of this name has kept before."""
        shutil.rmtree(self._path / OUTSIDE / controller, ignore_errors=True)


def _safe(name: str) -> str:
    """Make a name that every file system takes; one that had to be changed is told apart by a hash."""
    safe = re.sub(r"[^\w.,=+@()\[\]~-]", "_", name, flags=re.ASCII)[:MOST_OF_A_NAME].rstrip(".")
    if safe == name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}"
