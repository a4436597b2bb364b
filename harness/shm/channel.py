"""The ranks of one group as they see each other: messages in order, waiting, and who is gone.

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

from harness.shm import futex, signature
from harness.shm.deaths import Deaths
from harness.shm.errors import CollectiveTimeout, GroupAborted, PeerLost, ShmError
from harness.shm.memory import Arena, Handle, Segment
from harness.shm.peer import (
    ABORTED,
    BELL,
    DEPTH,
    FAILED,
    INLINE,
    JOINING,
    LEFT,
    LOCATION,
    POSTED,
    PRESENT,
    TEXT,
    WANTS_READ,
    Layout,
    Outgoing,
    Peer,
)

__tracebackhide__ = True  # under pytest a failure points to the call

_NOTHING, _INLINE, _SEGMENT = 0, 1, 2
_CALL, _REFUSAL = 0, 1

waits: dict[int, tuple[str, float]] = {}
"""What threads of this process wait for, and since when: by ident, where it has taken more than a moment.

A thread that waits here wakes up now and then, so the system does not show that it is blocked."""

EVERYONE = 0
"""The lane that all peers read."""


class Channel:
    """A rank's end of a group.

    Args:
        name: Of the group, for messages.
        peers: All ranks, this one included, in order.
        rank: Of this process.
        timeout: Seconds that a wait lasts at most.
        spin: How often to look before sleeping.
    """

    def __init__(self, name: str, peers: Sequence[Peer], rank: int, timeout: float, spin: int) -> None:
        self.name, self.rank, self.timeout = name, rank, timeout
        self.size = len(peers)
        self.peers = peers
        self.me = peers[rank]
        self.others = [peer for peer in peers if peer.rank != rank]
        self.arena = Arena()
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.finish_early: Callable[[int], None] = lambda number: None
        """Called with the number of a message to everyone that this rank must read before it can go on."""
        self.idle: Callable[[], None] | None = None
        """Called now and then while this rank waits."""
        self._wanting = 0
        self._spin = spin
        self._layout = Layout(self.size)
        self._next = [0] * (self.size + 1)
        self._in_use: list[tuple[int, int, Segment]] = []
        self._deaths = Deaths(self.others)
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
        """Return a 1-D tensor, whose values are undefined, in memory that peers can read.

        A collective whose input is there copies nothing for the peers, unless the input is the output too.
        They may read it until `await_readers` returns: until then it must not be written.

        Raises:
            OutOfSharedMemory: there is no memory for it.
        """
        with self.lock:
            self._reclaim()
            return self.arena.lend(numel, dtype, f"a buffer of {numel} {dtype}")

    def await_readers(self, tensor: Tensor) -> None:
        """Return when no peer will read the memory of `tensor` any more for what was called so far.

        Raises:
            ShmError: a peer that has not read it is gone, or does not read it within the timeout.
        """
        found = self.arena.find(tensor.data_ptr())
        if found is None:
            return
        for lane, number, segment in list(self._in_use):
            if segment is found[0]:
                for peer in self._readers(lane):
                    if not self.is_read(peer, lane, number):
                        with self.lock:
                            self._wait_until_read(lane, number, "the next use of a buffer")

    def post(self, message: Outgoing, text: bytes, note: bytes = b"") -> None:
        """Let peers see the message.

        Args:
            message: What `begin` returned.
            text: Its header, which peers compare with theirs.
            note: More for the header, at most 16 bytes for each rank.
        """
        self._publish(message, text, note, _CALL)

    def refuse(self, error: ShmError, lane: int = EVERYONE) -> None:
        """Post that this rank cannot take part in what is next, so that its peers raise too."""
        number = self._next[lane]
        message = Outgoing(lane, number, self.me.control, 0, 0, True)
        text = str(error).encode()[: signature.MAX_BYTES]
        self._publish(message, text, b"", _REFUSAL)

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
            ShmError: the peer has refused to take part.
        """
        at = self._header_at(lane, number) + LOCATION.size
        length, kind, _ = TEXT.unpack_from(peer.memory, at)
        text = bytes(peer.memory[at + TEXT.size : at + TEXT.size + length])
        if kind == _REFUSAL:
            raise ShmError(f"{peer} of group {self.name} could not take part: {text.decode()}")
        return text

    def note(self, peer: Peer, number: int, after: bytes, lane: int = EVERYONE) -> bytes:
        """Return the bytes in the header of a message that come after the text, as many as there can be."""
        at = self._header_at(lane, number) + LOCATION.size + TEXT.size + len(after)
        return bytes(peer.memory[at : at + 16 * self.size])

    def contents(self, peer: Peer, number: int, lane: int = EVERYONE) -> tuple[Segment, int]:
        """Return where the contents of a message are: a segment that is mapped here, and an offset in bytes.

        Raises:
            PeerLost: the peer is gone, and its memory with it.
        """
        at = self._header_at(lane, number)
        place, fd, inode, nbytes, offset = LOCATION.unpack_from(peer.memory, at)
        if place != _SEGMENT:
            return peer.control, self._layout.contents + INLINE * (lane * DEPTH + number % DEPTH)
        try:
            return peer.filled(Handle(fd, inode, nbytes)), offset
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            raise (PeerLost if gone else ShmError)(
                f"{peer} of group {self.name} has posted {nbytes} bytes that cannot be mapped: {error}"
            ) from error

    def mark_read(self, number: int, peers: Iterable[Peer] | None = None, lane: int = EVERYONE) -> None:
        """Let peers use the memory of their messages again."""
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

    def wait_until(
        self,
        peer: Peer,
        peers: Sequence[Peer],
        is_done: Callable[[Peer], bool],
        what: object,
        timeout: float | None,
    ) -> None:
        """Wait until something is so of `peer`; fail if one of `peers` can no longer make it so."""
        for _ in range(self._spin):
            if is_done(peer):
                return
        words, bell = peer.words, peer.bell
        began = looked = time.monotonic()
        limit = self.timeout if timeout is None else timeout
        thread = 0
        try:
            while True:
                seen = words[BELL]
                if is_done(peer):
                    return
                futex.wait(bell, seen)
                if is_done(peer):
                    return
                if self.idle is not None:
                    self.idle()
                now = time.monotonic()
                if now - looked >= futex.SLICE:
                    looked = now
                    thread = threading.get_ident()
                    waits[thread] = (str(what), began)
                    self._look_for_lost(peers, is_done, what)
                    if now - began >= limit:
                        self._time_out(peers, is_done, what, now - began)
        finally:
            if thread:
                del waits[thread]

    def linger(
        self, peer: Peer, peers: Sequence[Peer], is_done: Callable[[Peer], bool], what: object, since: float
    ) -> None:
        """Do one round of `wait_until`, which began at `since`: sleep for some milliseconds at most."""
        seen, began = peer.rung(), time.monotonic()
        if is_done(peer):
            return
        futex.wait(peer.bell, seen)
        now = time.monotonic()
        if now - began >= futex.SLICE:
            self._look_for_lost(peers, is_done, what)
            if now - since >= self.timeout:
                self._time_out(peers, is_done, what, now - since)

    def _look_for_lost(self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], what: object) -> None:
        self.check_usable(what)
        dead = self._deaths.ranks()
        for peer in peers:
            # Looked at last: it may have done it just before it went.
            state = peer.state
            if (state in (LEFT, ABORTED, FAILED) or peer.rank in dead) and not is_done(peer):
                self._raise_lost(peer, state, what)

    def _raise_lost(self, peer: Peer, state: int, what: object) -> None:
        if state == ABORTED:
            raise GroupAborted(f"{peer} has aborted group {self.name}, in which {what} waits for it")
        if state == FAILED:
            raise PeerLost(f"{peer} of group {self.name} has failed, {what} waits for it: {peer.reason}")
        verb = "has left the group" if state == LEFT else "is gone"
        raise PeerLost(f"{peer} of group {self.name} {verb}: {what} waits for it")

    def _time_out(
        self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], what: object, seconds: float
    ) -> None:
        missing = ", ".join(str(peer) for peer in peers if not is_done(peer)) or "any rank"
        text = f"{what} of group {self.name} timed out after {seconds:.1f} s: it waits for {missing}"
        self.me.change_state(FAILED, text)
        raise CollectiveTimeout(text)

    # -- the end

    def is_usable(self) -> bool:
        """Return whether this rank is still part of the group."""
        return self.me.state == PRESENT and self.pid == os.getpid()

    def is_lost(self, peer: Peer) -> bool:
        """Return whether a peer has left the group, or its process has ended."""
        return peer.state in (LEFT, ABORTED, FAILED) or peer.rank in self._deaths.ranks()

    def check_alive(self, peer: Peer, what: object) -> None:
        """Raise an error if a peer has died."""
        if peer.rank in self._deaths.ranks():
            self._raise_lost(peer, PRESENT, what)

    def check_usable(self, what: object) -> None:
        """Raise an error if this rank has no part in the group any more."""
        state = self.me.state
        if state == PRESENT and self.pid == os.getpid():
            return
        if self.pid != os.getpid():
            raise ShmError(
                f"{what}: group {self.name} belongs to process {self.pid}, of which this is a fork"
            )
        if state == ABORTED:
            raise GroupAborted(f"{what}: this rank has aborted group {self.name}")
        if state == FAILED:
            raise ShmError(f"{what}: group {self.name} has failed on this rank: {self.me.reason}")
        raise ShmError(f"{what}: this rank has left group {self.name}")

    def abort(self) -> None:
        """Let all ranks that wait in the group, and this one, raise `GroupAborted`."""
        if self.pid == os.getpid() and self.me.state in (JOINING, PRESENT):
            self.me.change_state(ABORTED)

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
                self._let_read(patience)
                self.me.change_state(LEFT)
            self.arena.close()
            self._in_use = []
            for peer in self.others:
                peer.forget()
            self._deaths.close()
            self.me.control.close()
            self.finish_early = lambda number: None  # no cycle keeps the memory

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
