"""One rank: its end of the wire, its process group and its pytest session."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Protocol

import pytest

from harness.properties.messages import GroupState
from harness.protocol import (
    AbortGroup,
    Agreed,
    Close,
    Finished,
    FromRank,
    Interrupt,
    Probe,
    Progress,
    RankSpec,
    RankStatus,
    Ready,
    RunItem,
    StartFailed,
    State,
    ToRank,
    Vote,
    Voted,
)
from harness.rank.forks import Copies
from harness.rank.output import capture_into
from harness.rank.process_group import DefaultGroup
from harness.rank.reporter import describe_raised
from harness.rank.session import RankSession, seed_everything
from harness.rank.state import count_collectives, count_groups
from harness.rank.status import (
    WIRE_THREAD,
    CrashReports,
    Stacks,
    describe_rank,
    issued_since,
    others_run_users_code,
    progress,
)
from harness.rank.world_fixture import RankWorld

LOOK_EVERY = 0.2
"""Seconds between looks of an idle rank whether its world's lease is asked back."""


class LeaseShare(Protocol):
    """A rank's share in what its world has leased of the machine."""

    def is_recalled(self) -> bool: ...


class Rank:
    """A rank from its start to its end.

    Two threads use the wire: the main one runs tests and sends what comes of them; a second one receives, so
    that the rank can say what it is doing, or end with its controller, while a test runs.
    """

    def __init__(self, spec: RankSpec, wire: Connection, lease: LeaseShare | None) -> None:
        self.spec = spec
        self.group = DefaultGroup(spec)
        self.world = RankWorld(spec, self.group.device)
        self.interrupted = False
        """Whether the controller has broken off the run; a KeyboardInterrupt is then no test's own."""
        self._wire = wire
        self._outbox: list[FromRank] = []
        self._sending = threading.Lock()
        self._phases = os.open(spec.phases_path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._state: State = "idle"
        self._case = ""
        self._item_began = 0
        self._stacks = Stacks()
        self._aborting = threading.Lock()
        self._abortable = ""
        self._progress: object = None
        self._inbox: queue.SimpleQueue[RunItem | Agreed | Close] = queue.SimpleQueue()
        self.crash_reports = CrashReports(spec.stacks_path)
        self.copies = Copies(spec.rank, self._let_go)
        self._lease = lease

    def join(self) -> None:
        """Answer the controller from here on, and meet the other ranks in the default process group."""
        gc.enable()  # the server has it off
        self.crash_reports.enable()
        threading.Thread(target=self._watch, name=WIRE_THREAD, daemon=True).start()
        self.group.join()

    def run(self) -> None:
        """Run items until the controller closes the session."""
        # Where torch logs, at level DEBUG, what every failed collective raises anyway: noise in reports.
        logging.getLogger("c10d-NullHandler-default").disabled = True
        capture_into(self.spec.captured_path)
        session = RankSession(self)
        try:
            status = pytest.main(list(self.spec.session.args), plugins=[session])
        except BaseException as error:
            if not session.started:  # sys.exit in a conftest: the process would end without a word
                self.send(StartFailed(f"it raised before it ran a test\n{describe_raised(error)}"))
            raise
        if not session.started:
            self.send(StartFailed(f"pytest ended with status {int(status)} before it ran a test"))
        self.group.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):  # a test has closed it
                stream.flush()
        os._exit(0)  # threads that tests have left would keep the process

    def _let_go(self) -> None:
        """In a copy of this process that a test has forked: leave to the rank what is the rank's."""
        if not self._wire.closed:  # else a copy of a copy
            self._wire.close()  # the controller must notice the rank's end, though the copy lives
            os.close(self._phases)
        self.group.let_go()

    def ready(self) -> None:
        """Tell the controller that items may come."""
        self.send(Ready())

    def post(self, message: FromRank) -> None:
        """Send a message with the next one that cannot wait: each write wakes the controller."""
        self.copies.end_copy()
        with self._sending:
            self._outbox.append(message)

    def send(self, message: FromRank) -> None:
        """Send a message, after those that were posted."""
        self.copies.end_copy()
        with self._sending:
            self._outbox.append(message)
            self._wire.send(tuple(self._outbox))
            self._outbox.clear()

    def note_phases_over(self, count: int) -> None:
        """Leave a note of how far the item has come; posted reports are lost if the process dies."""
        os.pwrite(self._phases, str(count).encode(), 0)

    def next_order(self) -> RunItem | Agreed | Close:
        """Wait for the controller to say what to do next."""
        if self._lease is None:
            return self._inbox.get()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=LOOK_EVERY)
            if self._lease.is_recalled():
                return Close()

    def agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]:
        """Tell all ranks how this one fared at a case of a test; return every rank's vote, in rank order.

        A rank that has ended the test counts as a vote with the outcome "ended".

        Args:
            abort_after: seconds to wait for the others before freeing those that wait for this rank.
        """
        self._state = "votes"
        self.send(Voted(vote))
        answer = self._early_order(abort_after) or self.next_order()
        self._state = "runs"
        assert isinstance(answer, Agreed)
        return answer.votes

    def _early_order(self, within: float | None) -> RunItem | Agreed | Close | None:
        """Return what the controller says in so many seconds; abort the group if it says nothing."""
        if within is None:
            return None
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=within)
        self.abort()
        return None

    def groups(self) -> GroupState:
        """Return in which state the process groups are."""
        return GroupState(self.group.is_aborted, count_collectives(), count_groups())

    def begin_case(self, name: str) -> None:
        """Note which subtest the test has come to, and give every generator the seed of the world."""
        self._case = self._abortable = name
        self.reseed()

    def end_case(self) -> None:
        """Note that what follows is in no subtest."""
        self._own_connections()
        self._case = ""

    def finish(self, message: Finished) -> None:
        """Tell the controller that the item is over."""
        self._state, self._case = "idle", ""
        self.send(message)

    def collectives(self) -> RankStatus:
        """Say which collectives this rank has begun in this test, and no more."""
        issued, before = issued_since(self._item_began, self.group.joined)
        return RankStatus("", "", "", issued, before, self._state, self._case)

    def abort(self) -> None:
        """Free the ranks that wait for this one in a collective; they see a broken connection."""
        self._own_connections()
        self.group.abort()

    def repair(self) -> None:
        """Meet the other ranks in a new process group, and let none go on before all have come.

        A rank that failed at once would break the connections that a slower one is still making.
        """
        self._own_connections()
        self.group.repair()
        self.agree(Vote(self._case, "met"))

    def _own_connections(self) -> None:
        """Let the controller cut none from here on: it may ask so late that the new group stands."""
        with self._aborting:
            self._abortable = ""

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
                case Probe(thoroughly):
                    self._answer(main, thoroughly)
                case AbortGroup(case):
                    with self._aborting:
                        if case == self._abortable:
                            self.group.abort()
                case Interrupt():
                    self.interrupted = True
                    self.group.abort()  # the main thread may wait in a collective, where no signal reaches it
                    signal.pthread_kill(main, signal.SIGINT)
                case RunItem():
                    self._state, self._item_began = "runs", time.time_ns()
                    self._inbox.put(message)
                case Agreed() | Close():
                    self._inbox.put(message)

    def _answer(self, main: int, full: bool) -> None:
        """Say what the main thread is doing, or only that it has run since the last time."""
        try:
            answer = self._say(main, full)
        except Exception:  # of what torch does not document; the thread that says it is needed on
            answer = RankStatus(traceback.format_exc(), "an unknown place", state=self._state)
        self.send(answer)

    def _say(self, main: int, full: bool) -> RankStatus | Progress:
        before, self._progress = self._progress, progress()
        if full:
            return self._describe(main)
        if self._state != "runs":
            return self.collectives()
        if before == self._progress and not others_run_users_code(self._stacks.take(), main):
            return self._describe(main)
        return Progress()

    def _describe(self, main: int) -> RankStatus:
        base = self.spec.session.cwd
        stacks = self._stacks.take()
        began, joined = self._item_began, self.group.joined
        return describe_rank(stacks, main, base, began, joined, self._state, self._case)
