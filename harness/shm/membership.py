"""A rank's part in a group: who its peers are, waiting until one of them has done something, who is gone."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from lockstep.shm import futex
from lockstep.shm.errors import CollectiveTimeout, GroupAborted, PeerLost, ShmError
from lockstep.shm.peer import ABORTED, BELL, FAILED, LEFT, PRESENT, Peer

__tracebackhide__ = True  # under pytest a failure points to the call

waits: dict[int, tuple[str, float]] = {}
"""Reason and begin of each wait of this process's threads, by ident, where it has taken more than a moment.

A thread that waits here wakes up now and then, so the system does not show that it is blocked."""


class Membership:
    """The ranks of a group, as one of them sees them.

    Args:
        name: Name of the group, for messages.
        peers: All ranks, this one included, in order.
        rank: Rank of this process.
        timeout: Seconds that a wait lasts at most.
        spin: How often to look before sleeping.
    """

    def __init__(self, name: str, peers: Sequence[Peer], rank: int, timeout: float, spin: int) -> None:
        self.name, self.rank, self.timeout = name, rank, timeout
        self.size = len(peers)
        self.peers = peers
        self.me = peers[rank]
        self.others = [peer for peer in peers if peer.rank != rank]
        self.pid = os.getpid()
        self.idle: Callable[[], None] | None = None
        """Called now and then while this rank waits."""
        self._spin = spin
        self._deaths = Deaths(self.others)

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
                    self.look_for_lost(peers, is_done, what)
                    if now - began >= limit:
                        self._time_out(peers, is_done, what, now - began)
        finally:
            if thread:
                del waits[thread]

    def linger(
        self, peer: Peer, peers: Sequence[Peer], is_done: Callable[[Peer], bool], what: object, since: float
    ) -> None:
        """Run one round of `wait_until`, which began at `since`: sleep for some milliseconds at most."""
        seen, began = peer.rung(), time.monotonic()
        if is_done(peer):
            return
        futex.wait(peer.bell, seen)
        now = time.monotonic()
        if now - began >= futex.SLICE:
            self.look_for_lost(peers, is_done, what)
            if now - since >= self.timeout:
                self._time_out(peers, is_done, what, now - since)

    def look_for_lost(self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], what: object) -> None:
        """Raise an error if one of `peers`, or this rank, is gone and something is not so of it."""
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
        self.check_process(what)
        if state == ABORTED:
            raise GroupAborted(f"{what}: this rank has aborted group {self.name}")
        if state == FAILED:
            raise ShmError(f"{what}: group {self.name} has failed on this rank: {self.me.reason}")
        raise ShmError(f"{what}: this rank has left group {self.name}")

    def check_process(self, what: object) -> None:
        """Raise an error in a child that was forked: what it marks as read, its parent has not read."""
        if self.pid != os.getpid():
            raise ShmError(
                f"{what}: group {self.name} belongs to process {self.pid}, of which this is a fork"
            )

    def abort(self) -> None:
        """Let all ranks that wait in the group, and this one, raise `GroupAborted`."""
        if self.pid == os.getpid() and self.me.state <= PRESENT:
            self.me.change_state(ABORTED)


class Deaths:
    """Notices when a peer's process ends, by a descriptor that the kernel makes readable then.

    Args:
        peers: The other ranks.

    Raises:
        OSError: a process is gone, or there are too few descriptors.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._poll = select.poll()
        self._of: dict[int, int] = {}
        self._dead: set[int] = set()
        self._lock = threading.Lock()
        try:
            for peer in peers:
                fd = os.pidfd_open(peer.pid)
                self._of[fd] = peer.rank
                self._poll.register(fd, select.POLLIN)
        except OSError:
            self.close()
            raise

    def ranks(self) -> set[int]:
        """Return the ranks that have ended."""
        with self._lock:  # two threads may not poll at once
            for fd, _ in self._poll.poll(0):
                self._dead.add(self._of[fd])
                self._poll.unregister(fd)
            return self._dead

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            for fd in self._of:
                os.close(fd)
            self._of, self._poll = {}, select.poll()
