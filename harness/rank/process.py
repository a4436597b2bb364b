"""One rank: its process group, and the cases that it runs in step with others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from pluggy import HookRelay

from lockstep.exceptions import PeerFailed
from lockstep.protocol import (
    REBUILT,
    VICTIM_OF_A_CASE,
    AbortGroup,
    Agreed,
    Close,
    Interrupt,
    Part,
    Probe,
    RunItem,
    ToRank,
    Vote,
)
from lockstep.rank.forks import Forks
from lockstep.rank.process_group import DefaultGroup
from lockstep.rank.rendezvous import Rendezvous
from lockstep.rank.state import RankState, seed_everything
from lockstep.rank.status import Activity, StatusReader
from lockstep.rank.torch_internals import open_lasting_pipe
from lockstep.rank.wire import Wire
from lockstep.rank.world_fixture import RankWorld
from lockstep.specification import RankSpec

ABORT_AFTER = 1.0
"""Seconds after which a rank that rebuilds its world frees those that still wait for it in a collective."""


class Rank:
    """A rank among those of its world."""

    def __init__(self, spec: RankSpec, connection: Connection) -> None:
        self.spec = spec
        self.group = DefaultGroup(spec)
        self.world = RankWorld(spec, self.group.device, self.regroup)
        self.forks = Forks(self.world, self._detach)
        self.wire = Wire(connection, spec.rank, self.forks.end_child)
        self.status = StatusReader(Activity(), self.group, spec.session.cwd)
        self.dead: set[int] = set()
        """The ranks that have died with an excuse, as far as is known."""
        self.left_behind: set[int] = set()
        """Dead ranks that are no members of the default group any more."""
        self.adopt_state: Callable[[RankState], None] = lambda before: None
        """Accept what has changed since a state; the session sets it."""
        self.hook: HookRelay
        """The hooks of the session, which sets it."""

    def join(self) -> None:
        """Answer the controller from now on, and meet the other ranks in the default process group."""
        self.wire.listen(self._handle)
        self.group.join()
        open_lasting_pipe()
        Rendezvous(self.spec, self.status.activity, self.group.stores).install()

    def _detach(self) -> None:
        """Leave to the rank, in a forked child of this process, what is the rank's."""
        self.wire.leave_to_rank()
        self.group.detach()

    def agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]:
        """Send this rank's vote on a case of a test; return the votes of all ranks, in rank order.

        A rank that has ended the test counts as a vote with the outcome "ended"; one that has died with an
        excuse has none.

        Args:
            abort_after: seconds to wait for the others before the group is aborted, which frees those that
                wait for this rank.
        """
        return tuple(each for each in self.meet(vote, abort_after).votes if each.outcome != "died")

    def meet(self, vote: Vote, abort_after: float | None = None) -> Agreed:
        """Vote, and return what else has happened, too; ranks that have died count, with that outcome."""
        activity = self.status.activity
        activity.meets_in = vote.case.partition("(")[0] or "a new process group"
        activity.state = "votes"
        self.wire.send(vote)
        answer = None
        if abort_after is not None and (answer := self.wire.next_answer(abort_after)) is None:
            self.abort()
        answer = answer or self.wire.next_answer()
        assert answer is not None, "it waits without a limit"
        self.dead |= {rank for rank, each in enumerate(answer.votes) if each.outcome == "died"}
        activity.state = "runs"
        return answer

    def begin_case(self, name: str, count: str = "") -> None:
        """Enter a case of the test, and seed every generator with the seed of the world.

        Args:
            count: which case of how many it is, "subtest 17 of 144".
        """
        activity = self.status.activity
        activity.count = count
        activity.case = activity.abortable = name
        self.group.ended.begin_case()
        seed_everything(self.spec.seed, self.group.device)

    def end_case(self) -> None:
        """Leave the case."""
        self._own_connections()
        activity = self.status.activity
        activity.case = activity.count = ""

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
        self.group.repair(self.status.activity.case)
        self.hook.pytest_ranks_regrouped()
        self.agree(Vote(self.status.activity.case, "met"))

    def regroup(self) -> tuple[int, ...]:
        """Meet the ranks that are left in a new default group; return the numbers that they have had.

        Raises:
            RuntimeError: another rank has ended the test, or does something else.
        """
        where = "world.rebuild()"
        votes = self.meet(Vote(where, "met", inside=True), ABORT_AFTER).votes
        if failed := [rank for rank, each in enumerate(votes) if each.outcome == "failed"]:
            raise PeerFailed(f"{VICTIM_OF_A_CASE}rank {', '.join(map(str, failed))}")
        if other := [(rank, each) for rank, each in enumerate(votes) if each.outcome not in ("met", "died")]:
            raise RuntimeError(f"{where}: all ranks that are left must call it; {_described(other)}")
        living = tuple(rank for rank, each in enumerate(votes) if each.outcome == "met")
        before = RankState.capture()
        self._own_connections()
        self.group.regroup(living)
        self.hook.pytest_ranks_regrouped()
        self.meet(Vote(where, REBUILT, inside=True))
        self.left_behind = set(range(len(votes))) - set(living)
        self.adopt_state(before)
        return living

    def _own_connections(self) -> None:
        """Ignore orders to abort from now on: one may come so late that it would abort the new group."""
        with self.status.activity.aborting:
            self.status.activity.abortable = ""

    def _handle(self, message: ToRank) -> None:
        """Handle a message of the controller, on the thread that receives."""
        activity = self.status.activity
        match message:
            case Probe():
                self.wire.send(self.status.answer(message))
            case AbortGroup(case):
                with activity.aborting:
                    if case == activity.abortable:
                        self.group.abort()
            case Part():
                self.hook.pytest_ranks_part(part=message)
            case Interrupt():
                self.group.abort()  # the main thread may wait in a collective, where no signal reaches it
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
            case RunItem():
                activity.state = "runs"
            case Close() | Agreed():
                pass  # the main thread waits for them


def _described(votes: list[tuple[int, Vote]]) -> str:
    ways = {"ended": "has ended the test, or died"}
    return ", ".join(f"rank {rank} {ways.get(each.outcome, f'is at {each.case}')}" for rank, each in votes)
