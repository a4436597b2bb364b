"""Progress of a rank in its item, in a file that it maps: the controller reads it once the rank has died.

Standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from lockstep.specification import RankSpec

# Two 64-bit words: phases of the current item that are over, and size of the log when that item began.
_WORDS = struct.Struct("QQ")
_PHASES, _LOG = 0, 1


def read_standing(spec: RankSpec) -> tuple[int, int]:
    """Return how many phases of its item a rank has ended, and where in its log the item begins, in bytes."""
    try:
        phases, log = _WORDS.unpack(Path(spec.path_of("standing")).read_bytes())
    except (OSError, struct.error):  # the rank has not begun, or the directory has been removed
        return 0, 0
    return phases, log


class Standing:
    """The file as its rank has it, which stores in memory alone: that outlives the process.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, spec: RankSpec) -> None:
        with Path(spec.path_of("standing")).open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, _WORDS.size)  # a store where there is no room kills the rank
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._log = os.open(spec.path_of("log"), os.O_RDONLY) if spec.session.captures else None

    def record_phases_over(self, count: int) -> None:
        """Record how far the item has come: of a rank that dies, reports may not have been sent."""
        self._words[_PHASES] = count

    def await_item(self) -> None:
        """Record that no phase of the coming item is over: what the log has so far belongs to no item."""
        self._words[_PHASES] = 0
        self._words[_LOG] = 0 if self._log is None else os.lseek(self._log, 0, os.SEEK_END)
