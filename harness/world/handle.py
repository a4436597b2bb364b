"""The controller's handle on one rank: its process, its end of the wire, and what it leaves in files.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lockstep.exceptions import MessageRefused
from lockstep.launch.multiprocessing_internals import pickle_message
from lockstep.launch.processes import StartedRank
from lockstep.protocol import FromRank, Probe, RankStatus, ToRank
from lockstep.specification import RankSpec
from lockstep.standing import read_standing
from lockstep.tracebacks import shorten, user_line
from lockstep.world.outcome import Died
from lockstep.world.rank_output import RankOutput, as_here

MOST_OUTPUT = 6000
"""Bytes of a rank's last output that are shown, of each stream."""
ANSWER_WITHIN = 0.5
"""Seconds a rank gets to say what it is doing; a rank that holds the GIL cannot."""
MESSAGE_WITHIN = 10
"""Seconds that a message may stop in the middle: its rank is stopped, and counts as dead."""
_DUMP_WITHIN = 0.3
"""Seconds that faulthandler gets to write stacks."""


class RankHandle:
    """One started rank.

    Attributes:
        died: How its process ended, once that was noticed.
    """

    def __init__(self, spec: RankSpec, started: StartedRank) -> None:
        self.rank = spec.rank
        self.died: Died | None = None
        self.spec = spec
        self.host = started.host
        self.started = started
        self._wire = started.wire
        self._sentinel = started.sentinel
        # Once a message has begun and does not go on, reading it raises.
        with socket.socket(fileno=os.dup(self._wire.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_WITHIN, 0))
        self._can_write = select.poll()
        self._can_write.register(self._wire, select.POLLOUT)

    def __str__(self) -> str:
        return f"rank {self.rank}"

    # The wire

    def send(self, message: ToRank) -> None:
        """Send a message; to a rank that has not read for so long that its wire is full, none."""
        self.send_packed(pickle_message(message))

    def send_packed(self, message: memoryview) -> None:
        """Send a message that several ranks get, and that was packed once for all of them."""
        with contextlib.suppress(OSError):  # a rank that has died is noticed where its end is awaited
            if self._can_write.poll(0):
                self._wire.send_bytes(message)

    def sources(self) -> tuple[Any, ...]:
        """Return what to wait for: both become ready when the rank has something to say, or has ended."""
        return () if self.died else (self._wire, self._sentinel)

    def read(self, source: Any) -> list[FromRank | Died]:
        """Read what came from one source: a batch of messages, or the end of the rank's wire or process."""
        if self.died:
            return []
        messages: list[FromRank | Died] = []
        refused = ""
        try:
            if source is self._wire:
                return [*self._wire.recv()]
            while self._wire.poll():  # its last words
                messages.extend(self._wire.recv())
        except (EOFError, OSError) as error:
            refused = f"{error}\n" if isinstance(error, MessageRefused) else ""
            self.started.join(15.0)  # its exit status follows the end of the wire, on a busy machine late
        code, gone = self.started.exitcode, self.lost_host()
        output = refused + self.output().read(MOST_OUTPUT)
        over = 1 if gone else self.phases_over()  # what cannot be asked any more: most time is of the call
        self.died = Died(code, output, time.time(), over, host_gone=gone)
        return [*messages, self.died]

    # What can be seen from outside

    def is_alive(self) -> bool:
        end = select.poll()
        end.register(self._sentinel, select.POLLIN)
        return not end.poll(0)

    def lost_host(self) -> str:
        """Return the name of its host if that is gone, else ""; the process has ended."""
        return self.host if self.started.exitcode is None and self.started.is_lost else ""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, as Ctrl-Z does; a debugger may take its time."""
        return self.started.state() == "T"

    def describe_silent(self) -> RankStatus:
        """Describe a rank that does not answer; its faulthandler needs no GIL to write stacks."""
        if self.started.state() in ("T", "t"):
            return RankStatus("(its process is stopped)", "an unknown place: it is stopped", state="stopped")
        if text := self._dump():
            where = user_line(text, self.spec.session.cwd)
            return RankStatus(shorten(text), f"{where or 'code'}, which holds the GIL", state="silent")
        return RankStatus("(not responding)", "a blocking system call", state="silent")

    def _dump(self) -> str:
        path = Path(self.spec.path_of("stacks"))
        with contextlib.suppress(OSError):
            self.started.fetch()
            before = path.stat().st_size
            self.started.signal(signal.SIGUSR1)
            size, until = before, time.monotonic() + _DUMP_WITHIN
            while time.monotonic() < until:  # the handler gives no sign when it is done
                time.sleep(0.03)
                self.started.fetch()
                size, last = path.stat().st_size, size
                if size == last != before:
                    break
            return as_here(path.read_text(errors="replace")[before:], self.started.moved)
        return ""

    def phases_over(self) -> int:
        """Return how many phases of the item the rank has ended."""
        self.started.fetch()
        return read_standing(self.spec)[0]

    def log(self) -> str:
        """Read what the rank wrote outside of pytest's capture since its item began: both ends of it."""
        return self.output().logged(MOST_OUTPUT)

    def output(self) -> RankOutput:
        """Return what the rank has printed, inside and outside of pytest's capture, since its item began."""
        path_of = self.spec.path_of
        self.started.fetch()
        start = read_standing(self.spec)[1]
        return RankOutput(Path(path_of("captured")), Path(path_of("log")), start, self.started.moved)

    # The end

    def close(self) -> None:
        """Give up what the handle has open; the process has ended."""
        self.started.close()

    def await_end(self, until: float) -> bool:
        """Wait until the process has ended, or the moment `until` (monotonic); return whether it has."""
        self.started.join(max(0.0, until - time.monotonic()))
        return not self.started.is_alive()

    def how_it_closed(self) -> Died | None:
        """Return how the process ended if that was an accident that was not reported before."""
        if self.started.exitcode in (0, None) or self.died:  # None: it is not known
            return None
        return Died(self.started.exitcode, self.log(), 0.0)


def request_statuses(
    handles: Collection[RankHandle], handle_message: Callable[[int, FromRank | Died], None] | None = None
) -> dict[int, RankStatus]:
    """Return the whole statuses of ranks that have not died.

    Args:
        handle_message: called with whatever they send until then; without it other messages are dropped.
    """
    answers: dict[int, RankStatus] = {}
    for handle in handles:
        handle.send(Probe(full=True))
    until = time.monotonic() + ANSWER_WITHIN
    # An answer without a record may be that to an earlier probe, and says less.
    while (
        waiting := [
            each
            for each in handles
            if each.died is None and (each.rank not in answers or answers[each.rank].record is None)
        ]
    ) and time.monotonic() < until:
        for rank, message in receive(waiting, until - time.monotonic()):
            if isinstance(message, RankStatus):
                answers[rank] = message
            if handle_message is not None:
                handle_message(rank, message)
    silent = [handle for handle in waiting if handle.rank not in answers]
    return answers | {handle.rank: handle.describe_silent() for handle in silent}


def receive(handles: Collection[RankHandle], timeout: float) -> list[tuple[int, FromRank | Died]]:
    """Wait for messages or ends of ranks; return those of one moment, a rank's words before its end.

    Args:
        timeout: seconds; what has come already is returned in any case.
    """
    # Not by `multiprocessing.connection.wait`, which takes three times as long.
    poll = select.poll()
    sources = {}
    for handle in handles:
        for source in handle.sources():
            number = source if isinstance(source, int) else source.fileno()
            poll.register(number, select.POLLIN)
            sources[number] = handle, source
    received: list[tuple[int, FromRank | Died]] = []
    for number, _ in poll.poll(math.ceil(max(timeout, 0.0) * 1000)):
        handle, source = sources[number]
        received.extend((handle.rank, message) for message in handle.read(source))
    return received
