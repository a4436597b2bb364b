"""Stacks of all Python threads of this process, while they run."""

from __future__ import annotations

import faulthandler
import os
import re
import threading
import traceback
from typing import NamedTuple

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Place(NamedTuple):
    """One frame: the line it is at."""

    file: str
    line: int
    function: str

    def summary(self) -> traceback.FrameSummary:
        """Return what `traceback` formats."""
        return traceback.FrameSummary(self.file, self.line, self.function, lookup_line=False)


Stack = tuple[Place, ...]
"""The frames of a thread, innermost first; the 100 innermost if there are more."""


class Stacks:
    """Takes stacks by Python's fault handler.

    Not by frame objects: on Python 3.11 the next frame of one that runs in another thread was seen to be a
    dict, and to crash the process, while torch's autograd engine was at work there.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("lockstep-stacks")
        self._taking = threading.Lock()

    def take(self) -> dict[int, Stack]:
        """Return the stack of each thread, by its ident."""
        with self._taking:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            faulthandler.dump_traceback(self._file, all_threads=True)
            text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return _parse(text.decode(errors="replace"))


def _parse(text: str) -> dict[int, Stack]:
    found: dict[int, list[Place]] = {}
    places: list[Place] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            places = found[int(match[1], 16)] = []
        elif match := _FRAME.match(line):
            places.append(Place(match[1], int(match[2]), match[3]))
    return {ident: tuple(stack) for ident, stack in found.items()}
