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
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from pluggy import HookRelay

from lockstep.exceptions import MessageRefused, PeerFailed
from lockstep.fake_ranks import FakeRank
from lockstep.injection.losses import Losses
from lockstep.protocol import (
    REBUILT,
    VICTIM_OF_A_CASE,
    AbortGroup,
    Agreed,
    Close,
    Finished,
    FromRank,
    GroupState,
    Interrupt,
    Lost,
    Part,
    Probe,
    Ready,
    RunItem,
    StartFailed,
    ToRank,
    Vote,
)
from lockstep.rank.output import capture_into, prefix_streams
from lockstep.rank.process_group import DefaultGroup
from lockstep.rank.pytest_internals import attach_log_handlers_quickly, set_root
from lockstep.rank.rendezvous import Rendezvous
from lockstep.rank.reporter import describe_raised
from lockstep.rank.session import RankSession, seed_everything
from lockstep.rank.state import CrashReports, RankState
from lockstep.rank.status import WIRE_THREAD, Activity, StatusReader
from lockstep.rank.torch_internals import count_collectives, count_groups, open_lasting_pipe
from lockstep.rank.world_fixture import RankWorld
from lockstep.specification import RankSpec
from lockstep.standing import Standing

if TYPE_CHECKING:
    from lockstep.injection.injector import Faults

ABORT_AFTER = 1.0
"""Seconds after which a rank that rebuilds its world frees those that still wait for it in a collective."""
LOOK_EVERY = 0.2
"""Seconds between looks of an idle rank at whether its world's lease is recalled."""


class LeaseShare(Protocol):
    """A rank's share in what its world has leased of the machine."""

    def is_recalled(self) -> bool: ...


class Rank:
    """A rank from its start to its end.

    Two threads use the wire: the main one runs tests and sends their reports; a second one receives, so that
    the rank can send its status, or end with its controller, while a test runs.
    """

    def __init__(self, spec: RankSpec, wire: Connection, lease: LeaseShare | None) -> None:
        self.spec = spec
        self.group = DefaultGroup(spec)
        self.world = RankWorld(spec, self.group.device, self.regroup)
        self.is_rebuilt = False
        """Whether a test has left other ranks behind, and may be this rank's last one."""
        self.dead: set[int] = set()
        """The ranks that have died as the test expects, as far as is known."""
        self.left_behind: set[int] = set()
        """Those of them that are no members of the default group any more."""
        self.losses = Losses()
        self.adopt_state: Callable[[RankState], None] = lambda before: None
        """Accept what has changed since a state; the session sets it."""
        self.hook: HookRelay
        """The hooks of the session, which sets it."""
        self.faults: Faults | None = None
        """The value of the fixture `faults`, once a test has used it."""
        self.interrupted = False
        """Whether the controller has broken off the run; a KeyboardInterrupt is then no test's own."""
        self._wire = wire
        self._outbox: list[FromRank] = []
        self._is_sending = False
        self._sending = threading.RLock()
        self._standing = Standing(spec)
        self._log = os.open(spec.path_of("log"), os.O_RDONLY) if spec.session.captures else None
        self._activity = Activity()
        self._rendezvous = Rendezvous(spec, self._activity, self.group.meeting_store)
        self.status = StatusReader(self._activity, self.group, spec.session.cwd)
        self._aborting = threading.Lock()
        self._abortable = ""
        self._orders: queue.SimpleQueue[RunItem | Close] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Agreed] = queue.SimpleQueue()
        self.crash_reports = CrashReports(spec.path_of("stacks"))
        self.forks = Forks(self.world, self._detach)
        self._lease = lease

    def join(self) -> None:
        """Answer the controller from now on, and meet the other ranks in the default process group."""
        gc.enable()  # the server has it off
        self.crash_reports.enable()
        threading.Thread(target=self._watch, name=WIRE_THREAD, daemon=True).start()
        self.group.join()
        open_lasting_pipe()
        self._rendezvous.install()

    def run(self) -> None:
        """Run items until the controller closes the session."""
        # Where torch logs, at level DEBUG, what every failed collective raises anyway: noise in reports.
        logging.getLogger("c10d-NullHandler-default").disabled = True
        capture_into(self.spec.path_of("captured"))
        if not self.spec.session.captures and self.spec.rank != self.spec.session.debugged_rank:
            prefix_streams(lambda: f"rank {self.world.rank}")
        attach_log_handlers_quickly()
        given = self.spec.session
        set_root(Path(given.rootdir), Path(given.inifile) if given.inifile else None)
        session = RankSession(self)
        try:
            status = pytest.main(list(given.args), plugins=[session])
        except BaseException as error:
            if not session.started:  # sys.exit in a conftest: the process would end without a message
                self.send(StartFailed(f"it raised before it ran a test\n{describe_raised(error)}"))
            raise
        if not session.started:
            self.send(StartFailed(f"pytest ended with status {int(status)} before it ran a test"))
        self.group.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):  # a test has closed it
                stream.flush()
        os._exit(0)  # threads that tests have left would keep the process

    def _detach(self) -> None:
        """Leave to the rank, in a forked child of this process, what is the rank's."""
        if not self._wire.closed:  # else a child of a child
            self._wire.close()  # the controller must notice the rank's end, though the child lives
        self.group.detach()

    def post(self, message: FromRank) -> None:
        """Send a message with the next one that cannot wait: each write wakes the controller."""
        self.forks.end_child()
        with self._sending:
            self._outbox.append(message)

    def send(self, message: FromRank) -> None:
        """Send a message, after those that were posted."""
        self.forks.end_child()
        with self._sending:
            self._outbox.append(message)
            if self._is_sending:  # a finaliser logs while a message is pickled: what is being sent goes first
                return
            self._is_sending = True
            try:
                while self._outbox:
                    outbox, self._outbox = self._outbox, []  # one step: a finaliser may post in between
                    self._wire.send(tuple(outbox))
            finally:
                self._is_sending = False

    def record_phases_over(self, count: int) -> None:
        """Record how far the item has come, as posted reports are lost if the process dies."""
        self._standing.record_phases_over(count)

    def next_order(self) -> RunItem | Close:
        """Return the next order of the controller; `Close` as soon as the lease is recalled."""
        order = self._take_order()
        if isinstance(order, RunItem):
            self._activity.state, self._activity.began = "runs", time.time_ns()
            self._rendezvous.item += 1
            self._activity.meeting = None
        return order

    def _take_order(self) -> RunItem | Close:
        if self._lease is None:
            return self._orders.get()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=LOOK_EVERY)
            if self._lease.is_recalled():
                return Close()

    def agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]:
        """Send this rank's vote on a case of a test; return the votes of all ranks, in rank order.

        A rank that has ended the test counts as a vote with the outcome "ended"; one that has died as the
        test expects has none.

        Args:
            abort_after: seconds to wait for the others before the group is aborted, which frees those that
                wait for this rank.
        """
        return tuple(each for each in self.meet(vote, abort_after).votes if each.outcome != "died")

    def meet(self, vote: Vote, abort_after: float | None = None) -> Agreed:
        """Do so, and return what has happened besides; ranks that have died count, with that outcome."""
        self._activity.state = "votes"
        self.send(vote)
        answer = None
        if abort_after is not None:
            try:
                answer = self._answers.get(timeout=abort_after)
            except queue.Empty:
                self.abort()
        answer = answer or self._answers.get()
        self.dead |= {rank for rank, each in enumerate(answer.votes) if each.outcome == "died"}
        self._activity.state = "runs"
        return answer

    def groups(self) -> GroupState:
        """Return the state of the process groups."""
        return GroupState(self.group.is_aborted, count_collectives(), count_groups())

    def begin_case(self, name: str, count: str = "") -> None:
        """Enter a case of the test, and seed every generator with the seed of the world.

        Args:
            count: which case of how many it is, "subtest 17 of 144".
        """
        self._activity.count = count
        self._activity.case = self._abortable = name
        self.reseed()

    def end_case(self) -> None:
        """Leave the case."""
        self._own_connections()
        self._activity.case = self._activity.count = ""

    def stand_for(self, fake: FakeRank) -> None:
        """Be a rank of a fake world for the coming item."""
        self.group.stand_for(fake)
        self.world.stand_for(fake)

    def finish(self, message: Finished) -> None:
        """Send the end of the item."""
        self._activity.state, self._activity.case, self._activity.count = "idle", "", ""
        self.send(message)
        self._standing.await_item(self._log_size())

    def stand_ready(self) -> None:
        """Wait for items from now on: what the rank has written so far belongs to none of them."""
        self._standing.await_item(self._log_size())
        self.send(Ready())

    def _log_size(self) -> int:
        return 0 if self._log is None else os.lseek(self._log, 0, os.SEEK_END)

    def abort(self) -> None:
        """Free the ranks that wait for this one in a collective; they see a broken connection."""
        self._own_connections()
        self.group.abort()

    def repair(self) -> None:
        """Meet the other ranks in a new process group, and wait until all have joined it.

        A rank that failed at once would break the connections that a slower one is still making.

        Raises:
            RuntimeError: a member of the group has died, so that not all can meet.
        """
        if dead := ", ".join(map(str, sorted(self.dead - self.left_behind))):
            raise RuntimeError(
                f"rank {dead} died, as the test expects, and the world was not rebuilt: call world.rebuild() "
                "before cases that may fail"
            )
        self._own_connections()
        self.group.repair()
        self._forget_connections()
        self.agree(Vote(self._activity.case, "met"))

    def regroup(self) -> tuple[int, ...]:
        """Meet the ranks that are left in a new default group; return the numbers that they have had.

        Raises:
            RuntimeError: another rank has ended the test, or does something else.
        """
        where = "world.rebuild()"
        votes = self.meet(Vote(where, "met", inside="rebuild"), ABORT_AFTER).votes
        if failed := [rank for rank, each in enumerate(votes) if each.outcome == "failed"]:
            raise PeerFailed(f"{VICTIM_OF_A_CASE}rank {', '.join(map(str, failed))}")
        if other := [(rank, each) for rank, each in enumerate(votes) if each.outcome not in ("met", "died")]:
            raise RuntimeError(f"{where}: all ranks that are left must call it; {_described(other)}")
        living = tuple(rank for rank, each in enumerate(votes) if each.outcome == "met")
        before = RankState.capture()
        self._own_connections()
        self.group.regroup(living)
        self._forget_connections()
        self.meet(Vote(where, REBUILT, inside="rebuild"))
        self.is_rebuilt = True
        self.left_behind = set(range(len(votes))) - set(living)
        self.adopt_state(before)
        return living

    def _own_connections(self) -> None:
        """Ignore orders to abort from now on: one may come so late that it would abort the new group."""
        with self._aborting:
            self._abortable = ""

    def _forget_connections(self) -> None:
        """Forget what was lost on those of before. All ranks are between two meetings."""
        self.losses.clear()
        self.hook.pytest_ranks_regrouped()

    def reseed(self) -> None:
        """Seed every generator of this process with the seed of the world."""
        seed_everything(self.spec.seed, self.group.device)

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                message: ToRank = self._wire.recv()
            except (EOFError, OSError) as error:
                if isinstance(error, MessageRefused):
                    os.write(2, f"rank {self.spec.rank}: {error}\n".encode())
                # The controller is gone: end, with all that tests have started.
                os.killpg(0, signal.SIGKILL)
                return
            match message:
                case Probe():
                    self.send(self.status.answer(message))
                case AbortGroup(case):
                    with self._aborting:
                        if case == self._abortable:
                            self.group.abort()
                case Lost(rank):
                    self.losses.note(rank)
                case Part():
                    self.hook.pytest_ranks_part(part=message)
                case Interrupt():
                    self.interrupted = True
                    self.group.abort()  # the main thread may wait in a collective, where no signal reaches it
                    signal.pthread_kill(main, signal.SIGINT)
                case RunItem():
                    self._activity.state = "runs"
                    self._orders.put(message)
                case Close():
                    self._orders.put(message)
                case Agreed():
                    self._answers.put(message)


def _described(votes: list[tuple[int, Vote]]) -> str:
    ways = {"ended": "has ended the test, or died"}
    return ", ".join(f"rank {rank} {ways.get(each.outcome, f'is at {each.case}')}" for rank, each in votes)


class Forks:
    """Ends forked children of this process, copies of the rank that must not go on as the rank.

    A child ends where its test would: where it comes back to the rank's own code. The children of
    multiprocessing never come back here; they only leave the rank's connections to the rank.

    Args:
        world: has its number, for the text.
        detach: called in each child as it is made, before anything of the test; gives up what belongs to the
            rank alone.
    """

    def __init__(self, world: RankWorld, detach: Callable[[], None]) -> None:
        self._world = world
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=detach)

    def end_child(self, error: BaseException | None = None) -> None:
        """Return in the rank; in a forked child, write to standard error how it ended, and end it.

        Its exit code is 0 if it came to the end of what it ran, 1 if that raised, or what it gave `sys.exit`.
        """
        if os.getpid() == self._pid:
            return
        match error:
            case None:
                how, status = "reached the end of its code there and was ended", 0
            case SystemExit(code=code):
                how = f"exited with {code!r}"
                status = code if isinstance(code, int) else int(code is not None)
            case _:
                what = "".join(traceback.format_exception_only(error)).strip()
                innermost = traceback.extract_tb(error.__traceback__)[-1]
                how = f"raised {what} at {innermost.filename}:{innermost.lineno} and was ended"
                status = 1
        with contextlib.suppress(OSError):
            os.write(
                2, f"rank {self._world.rank}: process {os.getpid()}, forked by the test, {how}\n".encode()
            )
        os._exit(status)

    @pytest.hookimpl(wrapper=True, trylast=True)  # innermost: no other plugin's code runs in a child
    def pytest_fixture_setup(self) -> Generator[None, object, object]:
        __tracebackhide__ = True
        return (yield from self.guard())

    def guard(self) -> Generator[None, object, object]:
        """Run what a hook wraps; end a child that comes out of it."""
        __tracebackhide__ = True
        try:
            result = yield
        except BaseException as error:
            self.end_child(error)
            raise
        self.end_child()
        return result
