"""Stacks of all Python threads of this process, taken in one moment."""

from __future__ import annotations

import sys
import time
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

_UNDISTURBED = 0.05
"""Seconds that no other thread takes the interpreter: far more than it takes to walk through all stacks."""


class Place(NamedTuple):
    """One frame as it was: what it ran, at which instruction and line."""

    code: CodeType
    instruction: int
    line: int

    def summary(self) -> traceback.FrameSummary:
        """Return what `traceback` formats."""
        return traceback.FrameSummary(self.code.co_filename, self.line, self.code.co_name, lookup_line=False)


Stack = tuple[Place, ...]
"""The frames of a thread, innermost first."""


def stacks() -> dict[int, Stack]:
    """Return the stack of each thread, by its ident.

    No thread runs meanwhile: the frames of one that does cannot be walked through. On Python 3.11 the next
    frame may then be any object at all.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_UNDISTURBED)
    try:
        time.sleep(0)  # a switch that somebody has asked for already comes here, and not below
        return {ident: _walk(frame) for ident, frame in sys._current_frames().items()}
    finally:
        sys.setswitchinterval(interval)


def _walk(frame: FrameType | None) -> Stack:
    places = []
    while frame is not None:
        places.append(Place(frame.f_code, frame.f_lasti, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(places)
