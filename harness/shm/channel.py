"""The messages that the ranks of one group post and read, in order.

Each rank has a control segment that it alone writes. In it are lanes: lane 0 is read by all peers, lane 1 + p
by peer p alone. A message is a header in a ring of `DEPTH`, with up to `INLINE` bytes beside it or more in a
segment of its own. A rank posts a message and counts up; a peer reads it when it likes, and marks it as read,
in its own control segment. A slot of the ring and the memory of a message are used again when all have read
it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.shm import futex, signature
from lockstep.shm.errors import OutOfSharedMemory, PeerLost, ShmError
from lockstep.shm.membership import Membership
from lockstep.shm.memory import OUT_OF, WHAT_TO_RAISE, Arena, Handle, Segment
from lockstep.shm.peer import (
    BELL,
    DEPTH,
    INLINE,
    LEFT,
    LOCATION,
    POSTED,
    PRESENT,
    TEXT,
    WANTS_READ,
    ControlLayout,
    Outgoing,
    Peer,
)

__tracebackhide__ = True  # under pytest a failure points to the call

_NOTHING, _INLINE, _SEGMENT = 0, 1, 2
_CALL, _REFUSAL, _NO_MEMORY = 0, 1, 2

EVERYONE = 0
"""The lane that all peers read."""


class Channel(Membership):
    """A rank's end of a group: what it posts for its peers, and reads of theirs."""

    def __init__(self, name: str, peers: Sequence[Peer], rank: int, timeout: float, spin: int) -> None:
        super().__init__(name, peers, rank, timeout, spin)
        self.arena = Arena()
        self.lock = threading.RLock()
        self.finish_early: Callable[[int], None] = lambda number: None
        """Called with the number of a message to everyone that this rank must read before it can continue."""
        self._wanting = 0
        self._layout = ControlLayout(self.size)
        self._next = [0] * (self.size + 1)
        self._in_use: list[tuple[int, int, Segment]] = []
        self._has_left = False

    # -- writing

    def _header_at(self, lane: int, number: int) -> int:
        layout = self._layout
        return layout.headers + layout.header * (lane * DEPTH + number % DEPTH)

    @property
    def next_number(self) -> int:
        """The number of the next message to everyone."""
        return self._next[EVERYONE]

    def begin(self, nbytes: int, what: object, lane: int = EVERYONE, at: int = 0) -> Outgoing:
        """Reserve the next message of a lane, with room for its contents; `post` must follow, under the lock.

        Args:
            nbytes: Size of the contents.
            what: The operation, for errors.
            lane: Who reads it.
            at: Address of the contents, 0 if they must be copied. In memory of `allocate` they stay where
                they are: the message `is_there`.

        Raises:
            OutOfSharedMemory: there is no memory for the contents.
        """
        self.check_usable(what)
        number = self._next[lane]
        if number >= DEPTH:
            self._wait_until_read(lane, number - DEPTH, what)
        if at and (found := self.arena.find(at)):
            self._in_use.append((lane, number, found[0]))
            return Outgoing(lane, number, *found, nbytes, False, is_there=True)
        if nbytes <= INLINE:
            offset = self._layout.contents + INLINE * (lane * DEPTH + number % DEPTH)
            return Outgoing(lane, number, self.me.control, offset, nbytes, True)
        if self._in_use:
            self._reclaim()
        segment = self.arena.take(nbytes, what)
        self._in_use.append((lane, number, segment))
        return Outgoing(lane, number, segment, 0, nbytes, False)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of undefined values in memory that peers can read.

        A collective with its input there copies nothing for the peers, unless the input is the output too.
        They may read it until `await_readers` returns: until then it must not be written.

        Raises:
            OutOfSharedMemory: there is no memory for it.
            ShmError: this rank has left the group, which would never give the memory back.
        """
        what = f"a buffer of {numel} {dtype}"
        with self.lock:
            self.check_usable(what)
            self._reclaim()
            return self.arena.lend(numel, dtype, what)

    def await_readers(self, tensor: Tensor) -> None:
        """Return when no peer will read the memory of `tensor` any more for what was called so far.

        Raises:
            ShmError: a peer that has not read it is gone, or does not read it within the timeout.
        """
        with self.lock:
            found = self.arena.find(tensor.data_ptr())
            for lane, number, segment in list(self._in_use):
                if found is not None and segment is found[0]:
                    for peer in self._readers(lane):
                        if not self.is_read(peer, lane, number):
                            self._wait_until_read(lane, number, "the next use of a buffer")

    def post(self, message: Outgoing, text: bytes, note: bytes = b"") -> None:
        """Let peers see the message.

        Args:
            message: What `begin` returned.
            text: Header, which peers compare with theirs.
            note: More for the header, at most 16 bytes for each rank.
        """
        self._publish(message, text, note, _CALL)

    def refuse(self, error: ShmError, lane: int = EVERYONE) -> None:
        """Post that this rank cannot take part in what is next, so that its peers raise too."""
        number = self._next[lane]
        message = Outgoing(lane, number, self.me.control, 0, 0, True)
        text = str(error).encode()[: signature.MAX_BYTES]
        self._publish(message, text, b"", _NO_MEMORY if isinstance(error, OutOfSharedMemory) else _REFUSAL)

    def _publish(self, message: Outgoing, text: bytes, note: bytes, kind: int) -> None:
        memory, words = self.me.memory, self.me.words
        at = self._header_at(message.lane, message.number)
        handle = message.segment.handle
        place = (_INLINE if message.is_inline else _SEGMENT) if message.nbytes else _NOTHING
        LOCATION.pack_into(memory, at, place, handle.fd, handle.inode, handle.nbytes, message.offset)
        text = TEXT.pack(len(text), kind, message.number) + text + note
        memory[at + LOCATION.size : at + LOCATION.size + len(text)] = text
        futex.fence(self.me.bell)
        self._next[message.lane] = message.number + 1
        words[POSTED + 8 * message.lane] = message.number + 1
        self.me.ring()

    def header(self, text: bytes, number: int) -> bytes:
        """Return the bytes that a peer's header equals if its message has this number and this text."""
        return TEXT.pack(len(text), _CALL, number) + text

    # -- reading

    def arrived(self, peer: Peer, number: int, lane: int = EVERYONE) -> bool:
        """Return whether a message has been posted."""
        posted: int = peer.words[POSTED + 8 * lane]
        return posted > number

    def wait_for(
        self,
        number: int,
        what: object,
        peers: Iterable[Peer] | None = None,
        lane: int = EVERYONE,
        timeout: float | None = None,
    ) -> None:
        """Wait until message `number` of a lane of all `peers` is there.

        Raises:
            PeerLost: one of them is gone and has not posted it.
            GroupAborted: one of them, or this rank, has aborted the group.
            CollectiveTimeout: it took longer than the timeout.
        """
        posted = POSTED + 8 * lane
        waited = list(self.others if peers is None else peers)
        for peer in waited:
            if peer.words[posted] <= number:
                self.wait_until(peer, waited, lambda one: one.words[posted] > number, what, timeout)

    def has_text(self, peer: Peer, number: int, header: bytes, lane: int = EVERYONE) -> bool:
        """Return whether a message of a peer has the header, as `header` makes it."""
        at = self._header_at(lane, number) + LOCATION.size
        return bytes(peer.memory[at : at + len(header)]) == header

    def text(self, peer: Peer, number: int, lane: int = EVERYONE) -> bytes:
        """Return the header of a message.

        Raises:
            ShmError: the peer has refused to take part; OutOfSharedMemory: for want of memory.
        """
        at = self._header_at(lane, number) + LOCATION.size
        length, kind, _ = TEXT.unpack_from(peer.memory, at)
        text = bytes(peer.memory[at + TEXT.size : at + TEXT.size + length])
        if kind != _CALL:
            raise (OutOfSharedMemory if kind == _NO_MEMORY else ShmError)(
                f"{peer} of group {self.name} could not take part: {text.decode(errors='replace')}"
            )
        return text

    def note(self, peer: Peer, number: int, after: bytes, lane: int = EVERYONE) -> bytes:
        """Return the bytes in the header of a message that come after the text, as many as there can be."""
        at = self._header_at(lane, number) + LOCATION.size + TEXT.size + len(after)
        return bytes(peer.memory[at : at + 16 * self.size])

    def contents(self, peer: Peer, number: int, lane: int = EVERYONE) -> tuple[Segment, int]:
        """Return where the contents of a message are: a segment that is mapped here, and an offset in bytes.

        Raises:
            PeerLost: the peer is gone, and its memory with it.
            OutOfSharedMemory: this process may not map so much more, or has no descriptor for it.
        """
        at = self._header_at(lane, number)
        place, fd, inode, nbytes, offset = LOCATION.unpack_from(peer.memory, at)
        if place != _SEGMENT:
            return peer.control, self._layout.contents + INLINE * (lane * DEPTH + number % DEPTH)
        try:
            return peer.filled(Handle(fd, inode, nbytes)), offset
        except OSError as error:
            text = f"{peer} of group {self.name} has posted {nbytes} bytes that cannot be mapped: {error}"
            if isinstance(error, FileNotFoundError):
                raise PeerLost(text) from error
            if error.errno not in OUT_OF:
                raise ShmError(text) from error
            raise OutOfSharedMemory(f"{text}. {WHAT_TO_RAISE}.") from error

    def mark_read(self, number: int, peers: Iterable[Peer] | None = None, lane: int = EVERYONE) -> None:
        """Let peers use the memory of their messages again."""
        futex.fence(self.me.bell)
        words = self.me.words
        kind = 0 if lane == EVERYONE else 1
        base = self._layout.read // 8 + kind * DEPTH + number % DEPTH
        for peer in self.others if peers is None else peers:
            words[base + 2 * DEPTH * peer.rank] = number + 1
            # A processor may load this word before its store is seen, and miss a peer that begins to wait at
            # this moment: that one looks again after `futex.SLICE`. A fence would cost every collective more.
            if peer.words[WANTS_READ]:
                self.me.ring()

    # -- waiting

    def is_read(self, peer: Peer, lane: int, number: int) -> bool:
        kind = 0 if lane == EVERYONE else 1
        read: int = peer.words[self._layout.read // 8 + (2 * self.rank + kind) * DEPTH + number % DEPTH]
        return read > number

    def _readers(self, lane: int) -> list[Peer]:
        return self.others if lane == EVERYONE else [self.peers[lane - 1]]

    def _wait_until_read(self, lane: int, number: int, what: object) -> None:
        if lane == EVERYONE:  # also where all have read it: they may wait for this rank's reading
            self.finish_early(number)
        readers = self._readers(lane)
        if all(self.is_read(peer, lane, number) for peer in readers):
            return
        with self.wanting_reads():
            for peer in readers:
                self.wait_until(peer, readers, lambda one: self.is_read(one, lane, number), what, None)

    @contextlib.contextmanager
    def wanting_reads(self) -> Iterator[None]:
        """Let peers ring when they have read a message of this rank."""
        self._wanting += 1
        self.me.words[WANTS_READ] = 1
        try:
            yield
        finally:
            self._wanting -= 1
            if not self._wanting:
                self.me.words[WANTS_READ] = 0

    def has_room(self, lane: int) -> bool:
        """Return whether a message to one peer can be posted without waiting."""
        number = self._next[lane]
        return number < DEPTH or self.is_read(self.peers[lane - 1], lane, number - DEPTH)

    def _reclaim(self) -> None:
        kept = []
        for entry in self._in_use:
            lane, number, segment = entry
            if all(self.is_read(peer, lane, number) for peer in self._readers(lane)):
                self.arena.give(segment)
            else:
                kept.append(entry)
        self._in_use = kept
        self.arena.take_back([segment for _, _, segment in kept])

    # -- the end

    def leave(self, patience: float) -> None:
        """Leave the group, and give back its memory.

        Args:
            patience: Seconds to wait at most for peers to read what this rank has posted in segments.
        """
        if self.pid != os.getpid():
            return
        with self.lock:
            if self._has_left:
                return
            self._has_left = True
            if self.me.state == PRESENT:
                # First: a peer that leaves too need not wait for what this rank will never read.
                self.me.change_state(LEFT)
                self._let_read(patience)
            self.arena.close()
            self._in_use = []
            for peer in self.others:
                peer.forget()
            self._deaths.close()
            self.me.control.close()
            self.finish_early, self.idle = lambda number: None, None  # no cycle keeps the memory

    def _let_read(self, patience: float) -> None:
        self._reclaim()
        self.me.words[WANTS_READ] = 1
        deadline = time.monotonic() + patience
        while self._in_use and time.monotonic() < deadline:
            lane, number, _ = self._in_use[0]
            unread = [peer for peer in self._readers(lane) if not self.is_read(peer, lane, number)]
            dead = self._deaths.ranks()
            waited = [peer for peer in unread if peer.state == PRESENT and peer.rank not in dead]
            if not waited:
                del self._in_use[0]
                continue
            seen = waited[0].words[BELL]
            if not self.is_read(waited[0], lane, number):
                futex.wait(waited[0].bell, seen)
