"""One rank of a group as its peers see it: its control segment, its state, the segments that it fills.

Each rank has a control segment that it alone writes: 64-bit words, and the headers and short contents of
messages (`channel.py`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from dataclasses import dataclass

from lockstep.shm import futex, signature
from lockstep.shm.memory import Handle, Segment

__tracebackhide__ = True  # under pytest a failure points to the call

DEPTH = 32
"""Messages of a lane that are there at once."""

INLINE = 8192
"""Bytes of contents that are beside the header; more are in a segment of their own."""

# Words of a control segment. What different processes write or wait for is 64 bytes apart at least.
STATE, BELL, WANTS_READ, REASON = 0, 8, 16, 24
_REASON_BYTES = 832
POSTED = 128
"""A word for each lane; then follows what this rank has read, then headers, then contents."""

LOCATION = struct.Struct("<QqQQQ")
"""Layout of a location: kind of place; descriptor, inode and size of the segment; offset of the contents."""

TEXT = struct.Struct("<IIQ")
"""Layout of the rest of a header: length of the text, kind of the message, its number."""

JOINING, MAPPED, PRESENT, LEFT, ABORTED, FAILED = range(6)
"""States of a rank in its group, in this order: one that is `MAPPED` has mapped the memory of all others."""


class ControlLayout:
    """The offsets, in bytes, within the control segment of a rank in a group of `size` ranks.

    Attributes:
        header: Size of a header.
        read: Start of what this rank has read of each other, then in each kind of lane.
        headers: Start of the headers of all lanes.
        contents: Start of the short contents of all lanes.
        nbytes: Size of the segment.
    """

    def __init__(self, size: int) -> None:
        self.header = -(-(LOCATION.size + TEXT.size + signature.MAX_BYTES + 16 * size) // 64) * 64
        self.read = 8 * POSTED + 64 * (size + 1)
        self.headers = self.read + 8 * DEPTH * 2 * size
        self.contents = self.headers + self.header * DEPTH * (size + 1)
        self.nbytes = self.contents + INLINE * DEPTH * (size + 1)


class Peer:
    """One rank of the group, this one included: its control segment, and the segments that it fills."""

    def __init__(self, rank: int, pid: int, control: Segment) -> None:
        self.rank, self.pid, self.control = rank, pid, control
        self.words, self.memory = control.words, control.memory
        self.bell = control.address + 8 * BELL
        self._filled: dict[int, Segment] = {}
        self._ringing = threading.RLock()  # a handler of a signal may abort the group in between

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def state(self) -> int:
        return self.words[STATE]

    @property
    def reason(self) -> str:
        """The error with which it failed."""
        text = bytes(self.memory[8 * REASON : 8 * REASON + _REASON_BYTES])
        return text.split(b"\0", 1)[0].decode(errors="replace")

    def ring(self) -> None:
        """Wake those who wait for this rank; to be called by itself."""
        with self._ringing:
            self.words[BELL] += 1
        futex.wake(self.bell)

    def rung(self) -> int:
        """Return how often it has rung: what `futex.wait` for it is given."""
        return self.words[BELL]

    def change_state(self, state: int, reason: str = "") -> None:
        """Let peers see another state of this rank; to be called by itself."""
        text = reason.encode()[: _REASON_BYTES - 1]
        self.memory[8 * REASON : 8 * REASON + len(text) + 1] = text + b"\0"
        futex.fence(self.bell)
        self.words[STATE] = state
        self.ring()

    def filled(self, handle: Handle) -> Segment:
        """Return a segment of this peer, mapped here.

        Raises:
            OSError: it is gone, or cannot be mapped.
        """
        segment = self._filled.get(handle.inode)
        if segment is None:
            for inode, known in list(self._filled.items()):
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{self.pid}/fd/{known.handle.fd}").st_ino == inode:
                        continue
                self._filled.pop(inode, None)  # the peer has given it up; another thread may have seen it
            segment = self._filled[handle.inode] = Segment.open(self.pid, handle)
        return segment

    def forget(self) -> None:
        """Give up what is mapped of the segments that it fills."""
        self._filled.clear()


@dataclass(slots=True)
class Outgoing:
    """A message that is being written."""

    lane: int
    number: int
    segment: Segment
    offset: int
    """Offset of its contents in the segment; 0 where it has none."""
    nbytes: int
    is_inline: bool
    is_there: bool = False
    """True if the contents need not be written."""

    @property
    def address(self) -> int:
        return self.segment.address + self.offset
