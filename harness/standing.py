"""The standing of each rank of a world: how far it has come, in memory that all of them share.

A file in the world's directory. The controller makes it, and reads from it of ranks that have died or hang;
ranks map it, and find out from it whether all have passed an item. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.protocol import Finished
from lockstep.specification import RankSpec

# A rank's part, a cache line of 64-bit words: how its last item of an even number ended, how that of an odd
# number did, phases of the current item that are over, size of the log when that item began.
_LINE = 8
_PHASES, _LOG = 2, 3
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
LOOK_EVERY = 0.05
"""Seconds that a wait lasts at most: a signal for Python may have come just before it began."""
LOOK_EVERY_WITHOUT_FUTEX = 0.0005
"""Seconds between looks on a processor whose number of the system call is not known here."""


def create_standing(directory: str, size: int) -> None:
    """Make the file for so many ranks, with its blocks: a rank that stores where there are none dies.

    Raises:
        OSError: there is no room.
    """
    with Path(directory, "standing").open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size * _LINE * 8)


def read_standing(spec: RankSpec) -> tuple[int, int]:
    """Return how many phases of its item a rank has ended, and where in its log the item begins, in bytes."""
    try:
        phases, log = struct.unpack_from("QQ", read_line(spec.directory, spec.rank), _PHASES * 8)
    except (OSError, struct.error):  # the directory has been removed
        return 0, 0
    return phases, log


def read_line(directory: str, rank: int) -> bytes:
    """Return the part of a rank, for the same file on another host.

    Raises:
        OSError: it cannot be read.
    """
    with Path(directory, "standing").open("rb") as file:
        file.seek(rank * _LINE * 8)
        return file.read(_LINE * 8)


def write_line(directory: str, rank: int, line: bytes) -> None:
    """Write the part of a rank as it is on its own host."""
    with Path(directory, "standing").open("r+b") as file:
        file.seek(rank * _LINE * 8)
        file.write(line)


def all_go_on(ends: Sequence[Finished]) -> bool:
    """Return whether ranks that have ended an item like this begin the next one if they have its order.

    `Standing.all_go_on` is the same for the ranks themselves: they must agree.
    """
    return all(end.goes_on for end in ends) and len({_tally(end) for end in ends}) == 1


def _tally(end: Finished) -> int:
    """Return in 47 bits what is the same on all ranks that are in step."""
    return (end.collectives & 0xFFFFFFFF) << 15 | end.groups & 0x7FFF


class Standing:
    """The standing of all ranks as one of them sees it, which writes its own line alone."""

    def __init__(self, spec: RankSpec) -> None:
        with Path(spec.directory, "standing").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._memory).cast("Q")
        self._own = spec.rank * _LINE
        self._peers = [rank * _LINE for rank in range(spec.key.size) if rank != spec.rank]
        self._item = 0
        self._word = 0
        self._wait, self._wake = _make_futex(self._memory)

    def record_phases_over(self, count: int) -> None:
        """Record how far the item has come: of a rank that dies, reports may not have been sent."""
        self._words[self._own + _PHASES] = count

    def await_item(self, log_size: int) -> None:
        """Record that no phase of the coming item is over, and where in the log it begins."""
        self._words[self._own + _PHASES], self._words[self._own + _LOG] = 0, log_size

    def end_item(self, end: Finished, log_size: int) -> None:
        """Let the other ranks know how the item ended. The controller must have the message already."""
        self.await_item(log_size)
        self._item += 1
        # In one word, which is stored at once, and with the number in the half that a futex compares. A rank
        # may end the next item, though not the one after it, before another has read this: hence two words.
        self._word = _tally(end) << 17 | (self._item & 0xFFFF) << 1 | end.goes_on
        index = self._own + self._item % 2
        self._words[index] = self._word
        self._wake(index)

    def all_go_on(self) -> bool:
        """Wait until all ranks have ended the last item; return whether the next one may begin at once."""
        return bool(self._word & 1) and all(
            self._ended(peer + self._item % 2) == self._word for peer in self._peers
        )

    def have_all_gone_on(self) -> bool:
        """Return whether `all_go_on` would return True, without waiting."""
        index = self._item % 2
        return bool(self._word & 1) and all(self._words[peer + index] == self._word for peer in self._peers)

    def _ended(self, index: int) -> int:
        """Wait for a rank to end the item; return its word."""
        while ((word := self._words[index]) ^ self._word) & 0x1FFFE:
            self._wait(index, word & 0xFFFFFFFF)
        return word


def _make_futex(memory: mmap.mmap) -> tuple[Callable[[int, int], object], Callable[[int], object]]:
    """Return functions that wait for a word of the memory to change from a value, and that wake who waits.

    Not those of lockstep.shm.futex: to import that package registers its backend with torch.distributed.
    """
    if _SYS_FUTEX is None:
        return lambda index, value: time.sleep(LOOK_EVERY_WITHOUT_FUTEX), lambda index: None
    import ctypes  # not in the controller

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    number, address = _SYS_FUTEX, ctypes.addressof(ctypes.c_char.from_buffer(memory))
    most = ctypes.byref(Timespec(0, int(LOOK_EVERY * 1e9)))
    types = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    waiting = ctypes.CDLL(None).syscall  # other threads run meanwhile
    waking = ctypes.PyDLL(None).syscall
    waiting.argtypes, waking.argtypes = types, types[:-1]
    return (
        lambda index, value: waiting(number, address + index * 8, _WAIT, value, most),
        lambda index: waking(number, address + index * 8, _WAKE, _ALL),
    )
