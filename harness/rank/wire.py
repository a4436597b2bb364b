"""A rank's end of its connection to the controller. Inside a rank; must not import torch."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from lockstep.exceptions import MessageRefused
from lockstep.protocol import Agreed, Close, FromRank, Interrupt, RunItem, ToRank

WIRE_THREAD = "lockstep-wire"
LOOK_EVERY = 0.2
"""Seconds between looks of an idle rank at whether it is to end."""


class Wire:
    """Sends what the rank has to say, and keeps what the controller sends until the rank takes it.

    Two threads use it: the main one runs tests and sends their reports; a second one receives, so that the
    rank can send its status, or end with its controller, while a test runs.

    Args:
        rank: number of this rank, for the text of an error.
        end_child: called before anything is sent; ends a forked child of the rank.

    Attributes:
        is_interrupted: Whether the controller has broken off the run; a KeyboardInterrupt is then no test's
            own.
    """

    def __init__(self, connection: Connection, rank: int, end_child: Callable[[], None]) -> None:
        self.is_interrupted = False
        self._connection = connection
        self._rank = rank
        self._end_child = end_child
        self._outbox: list[FromRank] = []
        self._is_sending = False
        self._sending = threading.RLock()
        self._orders: queue.SimpleQueue[RunItem | Close] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Agreed] = queue.SimpleQueue()

    def post(self, message: FromRank) -> None:
        """Send a message with the next one that cannot wait: each write wakes the controller."""
        self._end_child()
        with self._sending:
            self._outbox.append(message)

    def send(self, message: FromRank) -> None:
        """Send a message, after those that were posted."""
        self._end_child()
        with self._sending:
            self._outbox.append(message)
            if self._is_sending:  # a finaliser logs while a message is pickled: what is being sent goes first
                return
            self._is_sending = True
            try:
                while self._outbox:
                    outbox, self._outbox = self._outbox, []  # one step: a finaliser may post in between
                    self._connection.send(tuple(outbox))
            finally:
                self._is_sending = False

    def next_order(self, is_over: Callable[[], bool | None] | None = None) -> RunItem | Close:
        """Wait for the next order of the controller; return `Close` as soon as `is_over` returns True."""
        if is_over is None:
            return self._orders.get()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=LOOK_EVERY)
            if is_over():
                return Close()

    def next_answer(self, within: float | None = None) -> Agreed | None:
        """Wait for the answer to a vote; return None if it does not come within so many seconds."""
        try:
            return self._answers.get(timeout=within)
        except queue.Empty:
            return None

    def listen(self, handle: Callable[[ToRank], None]) -> None:
        """Receive from now on, in a thread that calls `handle` with each message before it keeps it."""
        threading.Thread(target=self._receive, args=(handle,), name=WIRE_THREAD, daemon=True).start()

    def _receive(self, handle: Callable[[ToRank], None]) -> None:
        while True:
            try:
                message: ToRank = self._connection.recv()
            except (EOFError, OSError) as error:
                if isinstance(error, MessageRefused):
                    os.write(2, f"rank {self._rank}: {error}\n".encode())
                # The controller is gone: end, with all that tests have started.
                os.killpg(0, signal.SIGKILL)
                return
            self.is_interrupted |= isinstance(message, Interrupt)
            handle(message)
            match message:
                case RunItem() | Close():
                    self._orders.put(message)
                case Agreed():
                    self._answers.put(message)

    def leave_to_rank(self) -> None:
        """Close it in a forked child, which may live longer: the controller must notice the rank's end."""
        if not self._connection.closed:  # else a child of a child
            self._connection.close()
