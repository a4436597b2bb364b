"""A collective under way: called by this rank, completed when all peers have called the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from lockstep.shm import futex, signature
from lockstep.shm.channel import Channel, Peer
from lockstep.shm.errors import CollectiveMismatch, ShmError
from lockstep.shm.record import Entry

__tracebackhide__ = True  # under pytest a failure points to the call

Finish = Callable[[int], None]
"""Fill the outputs of the collective of that number."""


class NumberedCall:
    """A collective call as messages name it."""

    __slots__ = ("number", "text")

    def __init__(self, text: bytes, number: int) -> None:
        self.text, self.number = text, number

    def __str__(self) -> str:
        return f"{signature.explain(self.text)} (#{self.number + 1})"


class Operation:
    """A collective that this rank has called: `complete` does the rest of it."""

    __slots__ = ("_finish", "_forget", "_lock", "call", "channel", "entry", "error", "is_done")

    def __init__(
        self,
        channel: Channel,
        call: NumberedCall,
        finish: Finish | None,
        entry: Entry,
        forget: Callable[[int], None],
    ) -> None:
        self.channel, self.call, self.entry = channel, call, entry
        self._finish, self._forget = finish, forget
        self._lock = threading.Lock()
        self.is_done = False
        self.error: BaseException | None = None

    def complete(self, timeout: float | None = None) -> None:
        """Wait for the peers, and fill the outputs; once.

        Raises:
            ShmError: what this or another wait for it has met.
        """
        if not self.is_done:
            self.channel.check_process(self.call)
            with self._lock:
                self._complete(timeout)
        if self.error is not None:
            raise self.error

    def try_complete(self) -> bool:
        """Complete it if all peers have called it; return whether it is complete, or has failed."""
        if not self.is_done:
            self.channel.check_process(self.call)
            if self._missing() or not self._lock.acquire(blocking=False):
                return False
            try:
                self._complete(None)
            finally:
                self._lock.release()
        return True

    def linger(self, since: float) -> None:
        """Sleep until a peer has called something, for some milliseconds; fail if none will or time is up."""
        missing, number = self._missing(), self.call.number
        if not missing:  # another thread is about to complete it
            time.sleep(futex.SLICE / 10)
            return
        try:
            channel = self.channel
            channel.linger(missing[0], missing, lambda one: channel.arrived(one, number), self.call, since)
        except ShmError as error:
            self._fail(error)

    def has_failed(self) -> bool:
        """Return whether it will never complete, as a peer is gone; without waiting."""
        missing, number = self._missing(), self.call.number
        try:
            self.channel.look_for_lost(missing, lambda one: self.channel.arrived(one, number), self.call)
        except ShmError as error:
            self._fail(error)
        return self.is_done

    def _fail(self, error: ShmError) -> None:
        with self._lock:
            if not self.is_done:
                self._end(error)

    def _missing(self) -> list[Peer]:
        return [peer for peer in self.channel.others if not self.channel.arrived(peer, self.call.number)]

    def _complete(self, timeout: float | None) -> None:
        if not self.is_done:
            try:
                self.channel.wait_for(self.call.number, self.call, timeout=timeout)
                self._collect()
            except Exception as error:  # not where the user interrupts: the peers continue
                self._end(error)
            else:
                self._end(None)

    def _collect(self) -> None:
        channel, number = self.channel, self.call.number
        futex.fence(channel.me.bell)
        header = channel.header(self.call.text, number)
        for peer in channel.others:
            if not channel.has_text(peer, number, header):
                self._raise_mismatch(peer)
        if self._finish is not None:
            self._finish(number)

    def _raise_mismatch(self, peer: Peer) -> NoReturn:
        channel, number = self.channel, self.call.number
        theirs = channel.text(peer, number)
        raise CollectiveMismatch(
            f"ranks called different collectives as #{number + 1} of group {channel.name}: "
            f"{channel.me} called {signature.explain(self.call.text)}, "
            f"{peer} called {signature.explain(theirs)}"
        )

    def _end(self, error: BaseException | None) -> None:
        self._finish = None
        self.error = error
        self.is_done = True
        self.channel.mark_read(self.call.number)
        self._forget(self.call.number)
        self.entry.complete()
