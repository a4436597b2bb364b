"""Stacks as faulthandler writes them: parsing, the user's line, shortening; and which files are the user's.

Used on both sides; standard library only.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_FRAMES = re.compile(r'(?:^  File ".*", line \d+ in .*\n?)+', re.MULTILINE)
_DIES = "Fatal Python error"
_OTHERS = ("<", str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep)


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to an installed package, to Python or to this harness."""
    return "/site-packages/" in filename or "/dist-packages/" in filename or filename.startswith(_OTHERS)


class StackFrame(NamedTuple):
    """One frame: the line it is at."""

    file: str
    line: int
    function: str

    def summary(self) -> traceback.FrameSummary:
        """Return what `traceback` formats."""
        return traceback.FrameSummary(self.file, self.line, self.function, lookup_line=False)


Stack = tuple[StackFrame, ...]
"""The frames of a thread, innermost first; the 100 innermost if there are more."""


class Thread(NamedTuple):
    """One thread of a dump."""

    ident: int
    is_current: bool
    """True if it is the one that crashed, or that the signal met."""
    stack: Stack


def parse(text: str) -> list[Thread]:
    """Return the threads of a dump, the newest first: the main thread is the last one."""
    found: list[tuple[int, bool, list[StackFrame]]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            found.append((int(match[2], 16), match[1] == "Current thread", []))
        elif found and (match := _FRAME.match(line)):
            found[-1][2].append(StackFrame(match[1], int(match[2]), match[3]))
    return [Thread(ident, is_current, tuple(stack)) for ident, is_current, stack in found]


def user_line(text: str, base: str) -> str:
    """Return `file:line in function` of the user's innermost line in the current thread, else the main one.

    "" if there is none: whatever other threads do there is not what the process died of, or hangs in.

    Args:
        text: a dump, and what else was printed; the last crash counts.
        base: directory that files are named from.
    """
    threads = parse(text.rpartition(_DIES)[2])
    current = [thread for thread in threads if thread.is_current]
    for thread in (*current[-1:], *threads[-1:]):
        for file, line, function in thread.stack:
            if not is_installed(file):
                return f"{file.removeprefix(f'{base}/')}:{line} in {function}"
    return ""


def shorten(text: str) -> str:
    """Leave out the dozens of frames by which Python, pytest and this harness come to the user's code."""
    return _FRAMES.sub(lambda match: _inner(match[0].splitlines(keepends=True)), text)


def _inner(stack: list[str]) -> str:
    """Return a stack up to the user's outermost line; without one, up to the first of pytest's."""
    files = [line.split('"')[1] for line in stack]
    users = [number for number, file in enumerate(files) if not is_installed(file)]
    pytests = [number for number, file in enumerate(files) if "/_pytest/" in file]
    (last, *_) = [*users[-1:], *pytests, len(stack)]
    return "".join(stack[: last + 1])
