"""A listener of this host: it takes in those who prove that they have the secret of the run.

A connection without a proof costs a descriptor for a few seconds, and of those there are few, in pytest's
process as in an agent's. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

from lockstep.features.hosts.wire import Call, Challenge, Credentials, SignedConnection

MOST_UNPROVEN = 32
"""Connections that may be without a proof at one time; the oldest gives way to a new one."""
PAUSE = 0.2
"""Seconds until the next attempt, where the process has no descriptor left, and none of these to close."""
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections, and admits those that are proved to be for this listener.

    Args:
        listening: the socket, at the address and port by which others know it.
        node: number of this host.
        credentials: of the run.
        kinds: purposes that it serves.
        admit: takes each connection, in the thread of `serve`; it must not wait.
    """

    def __init__(
        self,
        listening: socket.socket,
        node: int,
        credentials: Credentials,
        kinds: Collection[str],
        admit: Callable[[SignedConnection, Call], object],
    ) -> None:
        self.address, self.port = listening.getsockname()
        listening.setblocking(False)
        self._listening = listening
        self._node = node
        self._credentials = credentials
        self._kinds = kinds
        self._admit = admit
        self._unproven: list[Challenge] = []

    def serve(self, stop: Any) -> None:
        """Serve until `stop` can be read, whatever comes."""
        try:
            while True:
                sources: list[Any] = [self._listening, stop, *self._unproven]
                ready = wait(sources, self._patience())
                if stop in ready:
                    return
                for each in ready:
                    if isinstance(each, Challenge):
                        self._read(each)
                if self._listening in ready and not self._accept():
                    wait([stop], PAUSE)
                self._give_up(lambda each: each.until < monotonic())
        finally:
            self._give_up(lambda each: True)

    def close(self) -> None:
        self._listening.close()

    def _patience(self) -> float | None:
        return max(self._unproven[0].until - monotonic(), 0.0) if self._unproven else None

    def _accept(self) -> bool:
        """Take one connection; return False where there is no descriptor for it."""
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:  # else it has gone already
            if error.errno in _NONE_LEFT:
                return self._close_oldest()
            return True
        if len(self._unproven) >= MOST_UNPROVEN:
            self._close_oldest()
        try:
            self._unproven.append(Challenge(accepted, self._credentials))
        except OSError:
            accepted.close()
        return True

    def _close_oldest(self) -> bool:
        if not self._unproven:
            return False
        self._unproven.pop(0).close()
        return True

    def _give_up(self, is_over: Callable[[Challenge], bool]) -> None:
        while self._unproven and is_over(self._unproven[0]):
            self._close_oldest()

    def _read(self, challenge: Challenge) -> None:
        try:
            if (call := challenge.read()) is None:
                return
            if self._is_for_us(call):
                self._unproven.remove(challenge)
                self._admit(challenge.answer(), call)
                return
        except Exception:  # whatever it sends, or lacks of threads: the others are served
            pass
        with contextlib.suppress(ValueError):
            self._unproven.remove(challenge)
        challenge.close()

    def _is_for_us(self, call: Call) -> bool:
        """Whether the proof was meant for this listener, and not relayed from another one."""
        here = (self._node, self.address, self.port)
        return call.purpose.kind in self._kinds and here == (call.callee, call.address, call.port)
