"""Output of ranks: what is too long to send and show, the folder of `--rank-output-dir`, where logs go.

Used on both sides; standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.exceptions import WorldError

if TYPE_CHECKING:
    import pytest

MAX_TEXT = 200_000
"""Characters of one captured section, message or list of lines that leave a rank."""
MAX_MESSAGE = 20_000
"""Characters of an exception's message, or of one line of a traceback."""
KEEP_ALL = "--rank-output-dir DIR keeps all of it"
OUTSIDE = "outside-of-tests"
"""The folder of what ranks print before, between and after tests, a folder for each controller and world."""
MAX_NAME = 120
"""Bytes. File systems take 255."""


def truncate(text: str, most: int = MAX_TEXT, remedy: str = "") -> str:
    """Return `text`, or if it has more than `most` characters its head and tail with a note between them.

    Args:
        remedy: what the note says of how to see the rest.
    """
    if len(text) <= most:
        return text
    half = (most - len(_note(len(text), "characters", remedy))) // 2
    head, tail = _head(text[:half]), _tail(text[-half:])
    return _join(head, _note(len(text) - len(head) - len(tail), "characters", remedy), tail)


def truncate_lines(lines: list[str], most: int = MAX_TEXT) -> list[str]:
    """Return `lines`, or if they have more than `most` characters in all the first and the last of them."""
    if sum(map(len, lines)) <= most:
        return lines
    first = _count_of_half(lines, most // 2)
    last = _count_of_half(lines[first:][::-1], most // 2)
    left_out = len(lines) - first - last
    if not left_out:
        return lines
    note = "[... 1 line left out ...]" if left_out == 1 else f"[... {left_out:,} lines left out ...]"
    return [*lines[:first], note, *lines[first + left_out :]]


def _count_of_half(lines: list[str], most: int) -> int:
    """Return how many of the lines, from the first on, have at most `most` characters; at least one."""
    totals = itertools.accumulate(map(len, lines))
    return max(sum(total <= most for total in totals), min(len(lines), 1))


def read_truncated(path: str | Path, start: int = 0, most: int = MAX_TEXT, remedy: str = "") -> str:
    """Read a text file from the byte `start` on; of more than `most` bytes only the head and the tail.

    Returns the empty string for a file that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size - start
            if size <= most:
                return os.pread(file.fileno(), max(size, 0), start).decode(errors="replace")
            half = (most - len(_note(size, "bytes", remedy))) // 2
            head = _head(os.pread(file.fileno(), half, start).decode(errors="replace"))
            tail = _tail(os.pread(file.fileno(), half, start + size - half).decode(errors="replace"))
    except OSError:
        return ""
    left_out = size - len(head.encode()) - len(tail.encode())
    return _join(head, _note(left_out, "bytes", remedy), tail)


def _join(head: str, note: str, tail: str) -> str:
    return head + (note.lstrip("\n") if head.endswith("\n") else note) + tail


def _note(count: int, unit: str, remedy: str) -> str:
    return f"\n[... {count:,} {unit} left out{'; ' if remedy else ''}{remedy} ...]\n"


def _head(text: str) -> str:
    """Leave out a line that is not whole, unless it is most of the text."""
    end = text.rfind("\n", len(text) // 2)
    return text if end < 0 else text[: end + 1]


def _tail(text: str) -> str:
    start = text.find("\n", 0, len(text) // 2)
    return text[start + 1 :]


def write_text(path: Path, text: str) -> None:
    """Write a file at once: its readers see the old one or the new one.

    Raises:
        OSError: it cannot be written; nothing of it is left behind.
    """
    write_texts({path: text})


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write files aside, and move them to their places once all of them could be written.

    Raises:
        OSError: one of them cannot be written; none of them is, then.
    """
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    try:
        for path, part in parts.items():
            part.write_text(texts[path], encoding="utf-8", errors="backslashreplace", newline="")
            if path.is_dir():  # the one reason for which the file beside it cannot be moved there
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):  # a parent that is no folder
                part.unlink()


class OutputDirectory:
    """The folder of the output of each test and world.

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
                raise WorldError(
                    f"--rank-output-dir: cannot remove an earlier run's output: {error}"
                ) from None

    def write(self, nodeid: str, rank: int, kind: str, text: str, mode: Literal["a", "w"]) -> Path:
        """Append `text` to the test's file `rank-<rank>.<kind>`, or replace that by it; return the file.

        Raises:
            OSError: it cannot be written.
        """
        path = self.of_test(nodeid) / f"rank-{rank}.{_safe(kind)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        return path

    def keep_log(self, controller: str, world: str, log: Path) -> None:
        """Copy a rank's log, what it wrote outside of tests, unless it is empty or cannot be copied."""
        with contextlib.suppress(OSError):  # the world is at its end: there is no test left to report it
            if log.stat().st_size:
                folder = self._path / OUTSIDE / controller / world
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, folder / log.name)

    def clear_logs(self, controller: str) -> None:
        """Remove the logs that a controller of this name has kept before."""
        shutil.rmtree(self._path / OUTSIDE / controller, ignore_errors=True)


def _safe(name: str) -> str:
    """Make a name that every file system takes; one that had to be changed gets a hash."""
    safe = re.sub(r"[^\w.,=+@()\[\]~-]", "_", name, flags=re.ASCII)[:MAX_NAME].rstrip(".")
    if safe == name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}"


def shows_logs(config: pytest.Config) -> bool:
    """Return whether log records are shown while tests run; never under `-p no:logging`."""
    has_plugin = config.pluginmanager.hasplugin("logging")
    return has_plugin and bool(config.getoption("log_cli_level") is not None or config.getini("log_cli"))


def shows_live(config: pytest.Config) -> bool:
    """Return whether ranks may show something on the terminal while a test runs."""
    return shows_logs(config) or bool(config.getoption("setupshow", False))


def log_file(config: pytest.Config) -> str:
    """Return the path of the file that log records are written to, "" if there is none."""
    if not config.pluginmanager.hasplugin("logging"):
        return ""
    return str(config.getoption("log_file") or config.getini("log_file") or "")
