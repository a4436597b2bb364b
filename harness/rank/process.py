"""One rank: its end of the wire, its process group and its pytest session."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from harness.launch.limits import explain
from harness.protocol import (
    Agreed,
    Broken,
    Close,
    FromRank,
    Interrupt,
    RankSpec,
    Ready,
    RunItem,
    ShowStacks,
    ToRank,
    Vote,
    Voted,
)
from harness.rank.doing import WIRE_THREAD, describe_rank
from harness.rank.process_group import DefaultGroup
from harness.rank.session import RankSession, seed_everything
from harness.rank.view import RankWorld


class Rank:
    """A rank from its start to its end.

    Two threads use the wire: the main one runs tests and sends what comes of them; a second one receives, so
    that the rank can say what it is doing, or end with its controller, while a test runs.
    """

    def __init__(self, spec: RankSpec, wire: Connection) -> None:
        self.spec = spec
        self.group = DefaultGroup(spec)
        self.world = RankWorld(spec, self.group.device)
        self.interrupted = False
        """Whether the controller has broken off the run; a KeyboardInterrupt is then no test's own."""
        self._wire = wire
        self._outbox: list[FromRank] = []
        self._sending = threading.Lock()
        self._phases = os.open(spec.phases_path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._inbox: queue.SimpleQueue[RunItem | Agreed | Close] = queue.SimpleQueue()

    def run(self) -> None:
        """Live until told to close."""
        gc.enable()  # the server has it off
        with Path(self.spec.stacks_path).open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            threading.Thread(target=self._watch, name=WIRE_THREAD, daemon=True).start()
            self._join()
            # Where torch logs, at level DEBUG, what every failed collective raises anyway: noise in reports.
            logging.getLogger("c10d-NullHandler-default").disabled = True
            session = RankSession(self)
            status = pytest.main(list(self.spec.session.args), plugins=[session])
            if not session.started:
                self.send(Broken(f"pytest ended with status {int(status)} before it ran a test"))
            self.group.leave()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)  # threads that tests have left would keep the process

    def _join(self) -> None:
        try:
            self.group.join()
        except Exception as error:  # torch raises its own kinds; what they say is what counts
            self.send(Broken(f"it could not join its process group: {explain(error)}"))
            os._exit(1)

    def ready(self) -> None:
        """Tell the controller that items may come."""
        self.send(Ready())

    def post(self, message: FromRank) -> None:
        """Send a message with the next one that cannot wait: each write wakes the controller."""
        with self._sending:
            self._outbox.append(message)

    def send(self, message: FromRank) -> None:
        """Send a message, after those that were posted."""
        with self._sending:
            self._outbox.append(message)
            self._wire.send(tuple(self._outbox))
            self._outbox.clear()

    def note_phases_over(self, count: int) -> None:
        """Leave a note of how far the item has come; posted reports are lost if the process dies."""
        os.pwrite(self._phases, str(count).encode(), 0)

    def next_order(self) -> RunItem | Agreed | Close:
        """Wait for the controller to say what to do next."""
        return self._inbox.get()

    def agree(self, vote: Vote) -> tuple[Vote, ...]:
        """Tell all ranks how this one fared at a point of a test; return every rank's vote, in rank order.

        A rank that has ended the test counts as a vote with the outcome "ended".
        """
        self.send(Voted(vote))
        answer = self.next_order()
        assert isinstance(answer, Agreed)
        return answer.votes

    def sever(self) -> None:
        """Free the ranks that wait for this one in a collective; they see a broken connection."""
        self.group.sever()

    def repair(self) -> None:
        """Meet the other ranks in a new process group."""
        self.group.repair()

    def reseed(self) -> None:
        """Give every generator of this process the seed of the world."""
        seed_everything(self.spec.seed, self.group.device)

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                message: ToRank = self._wire.recv()
            except (EOFError, OSError):
                # The controller is gone: end, and take along what a test may have started.
                os.killpg(0, signal.SIGKILL)
                return
            match message:
                case ShowStacks():
                    self.send(describe_rank(main, self.spec.session.cwd))
                case Interrupt():
                    self.interrupted = True
                    self.group.sever()  # the main thread may wait in a collective, where no signal reaches it
                    signal.pthread_kill(main, signal.SIGINT)
                case RunItem() | Agreed() | Close():
                    self._inbox.put(message)
