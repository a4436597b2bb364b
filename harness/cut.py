"""Cut what is too long to be sent and shown to its head and its tail, and say what was left out.

Used on both sides; standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_OF_A_TEXT = 200_000
"""Characters of one captured section, message or list of lines that leave a rank."""
MOST_OF_A_MESSAGE = 20_000
"""Characters of an exception's message, or of one line of a traceback."""
KEEP_ALL = "--rank-output-dir DIR keeps all of it"


def cut(text: str, most: int = MOST_OF_A_TEXT, remedy: str = "") -> str:
    """Return `text`, or if it has more than `most` characters its head and tail with a note between them.

    Args:
        remedy: what the note says of how to see the rest.
    """
    if len(text) <= most:
        return text
    half = (most - len(_note(len(text), "characters", remedy))) // 2
    head, tail = _head(text[:half]), _tail(text[-half:])
    return _join(head, _note(len(text) - len(head) - len(tail), "characters", remedy), tail)


def cut_lines(lines: list[str], most: int = MOST_OF_A_TEXT) -> list[str]:
    """Return `lines`, or if they have more than `most` characters in all the first and the last of them."""
    if sum(map(len, lines)) <= most:
        return lines
    first = _count_of_half(lines, most // 2)
    last = _count_of_half(lines[:first:-1], most // 2)
    left_out = len(lines) - first - last
    return [*lines[:first], f"[... {left_out:,} lines left out ...]", *lines[first + left_out :]]


def _count_of_half(lines: list[str], most: int) -> int:
    """How many of the lines, from the first on, have not more than `most` characters; at least one."""
    total = 0
    for count, line in enumerate(lines):
        total += len(line)
        if total > most:
            return max(count, 1)
    return len(lines)


def read_cut(path: str | Path, start: int = 0, most: int = MOST_OF_A_TEXT, remedy: str = "") -> str:
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
