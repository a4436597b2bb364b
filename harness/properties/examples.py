"""The examples of one rank, kept in step with those of the others. Runs inside a rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import core
from hypothesis.internal.conjecture.data import ConjectureData

from harness.exceptions import PeerFailed
from harness.properties import desync
from harness.properties.attempt import Attempt
from harness.properties.clock import LockstepClock
from harness.properties.crashed import CrashGuard
from harness.properties.desync import LeftAlone, OutOfStep
from harness.properties.messages import ExampleResult, RankInStep, RunningExampleFile
from harness.properties.origin import set_origin
from harness.protocol import Search, Vote

__hypothesistracebackhide__ = True  # our frames are no news in a failure's traceback

PATIENCE = 0.03
"""Seconds that a rank that has failed waits for the others before it frees them from waiting for it."""

HUNG_AT_MOST = 20.0
"""Seconds that examples may take in all in which no rank could get on, before the search ends."""


Body = Callable[[ConjectureData], object]
Runner = Callable[[ConjectureData, Body], object]


def _call(runner: Runner, function: Body, data: ConjectureData) -> object:
    __tracebackhide__ = True
    return runner(data, function)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Leave lines out of what Hypothesis takes for an explanation: lines that only failing examples run."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


def _ends_early(mine: Vote, votes: Sequence[Vote]) -> bool:
    """Whether another rank has ended the property, as only an error of its own can make it do."""
    return mine.case != desync.END and any(vote.case == desync.END for vote in votes)


class Examples:
    """Runs examples so that all ranks pass, fail, reject and skip them together."""

    def __init__(self, rank: RankInStep) -> None:
        self.rank = rank.spec.rank
        self.clock = LockstepClock()
        self.is_active = False
        self.seed: int | None = None
        """What brings the failure of this test up again, where no database keeps it."""
        self.running = RunningExampleFile(rank.spec.running_path)
        self.crash_guard = CrashGuard(self.running)
        self._rank = rank
        self._run = self._count = self._total = 0
        self._began = 0.0
        self._search_goes_on = True
        self._hung = 0.0

    def begin_item(self, search: Search) -> None:
        """Note that a test begins, in which ranks keep in step."""
        self.is_active = True
        self.seed = None
        self._run = self._count = self._total = 0
        self._began = time.monotonic()
        self._search_goes_on = search.continues
        self._hung = 0.0
        self.clock.advance(0.0)
        self.crash_guard.begin_item(search.crashed)
        core.threadlocal._hypothesis_global_random = random.Random(search.entropy)

    def must_stop(self) -> bool:
        """Whether the search for smaller examples has to end: each costs too much, and there were enough."""
        return self._hung > HUNG_AT_MOST or (self.crash_guard.has_met_last and not self._search_goes_on)

    def end_item(self) -> None:
        self.is_active = False

    # One example

    def run(
        self,
        runner: Runner,
        data: ConjectureData,
        function: Body,
    ) -> object:
        """Run an example where Hypothesis would call `runner(data, function)`; all ranks do.

        Raises:
            PeerFailed: it failed on another rank.
            OutOfStep: ranks have drawn or decided differently.
            BaseException: what the example raised here.
        """
        __tracebackhide__ = True
        self._count += 1
        self._total += 1
        case = desync.example(self._total)
        attempt = Attempt(data, self.running, self.crash_guard)
        self._rank.begin_case(case)
        self.running.begin(self._run, self._count)
        attempt.run(functools.partial(_call, runner, function))
        votes, told = self._vote(attempt, case)
        self.running.end()
        if any(vote.outcome == "failed" for vote in votes):
            self._mend(case)
            self._fail(attempt, votes, told)
        self._expect_all_alike(attempt, votes, told)
        attempt.share(told)
        attempt.recorder.hand_over()
        if attempt.error is not None:
            raise attempt.error
        return attempt.result

    def _vote(self, attempt: Attempt, case: str) -> tuple[tuple[Vote, ...], list[ExampleResult]]:
        __tracebackhide__ = True
        vote = attempt.vote(case, time.monotonic() - self._began)
        votes = self._agree(vote, PATIENCE if vote.outcome == "failed" else None)
        told = [ExampleResult.unpack(each.more) for each in votes]
        before = self.clock.monotonic()
        self.clock.advance(told[0].seconds)
        cut_off = [each.lost_connection for each in told if each.origin is not None]
        if cut_off and all(cut_off):
            self._hung += self.clock.monotonic() - before
        return votes, told

    def _agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]:
        """Vote.

        Raises:
            LeftAlone: another rank has ended the test.
            OutOfStep: another rank is elsewhere in it.
        """
        __tracebackhide__ = True
        votes = self._rank.agree(vote, abort_after)
        if any(other.outcome == "ended" for other in votes) or _ends_early(vote, votes):
            raise LeftAlone(desync.tell_places(votes))
        if any(other.case != vote.case for other in votes):
            raise OutOfStep(desync.tell_places(votes))
        return votes

    def ask_all(self, case: str, say: object) -> list[Any]:
        """Exchange something with all ranks; return what each said."""
        __tracebackhide__ = True
        return [vote.more for vote in self._agree(Vote(case, "asks", "", say, renews_deadline=True))]

    def _mend(self, case: str) -> None:
        """Meet the other ranks in a new process group, unless the failure has left this one whole."""
        __tracebackhide__ = True
        left = self.ask_all(f"the end of {case}", self._rank.groups())
        if any(each.is_aborted for each in left) or len(set(left)) > 1:
            with _untraced():
                self._rank.repair()

    def _fail(self, attempt: Attempt, votes: tuple[Vote, ...], told: list[ExampleResult]) -> None:
        """Raise what this rank has to say of an example that failed on one rank at least."""
        __tracebackhide__ = True
        failed = [rank for rank, vote in enumerate(votes) if vote.outcome == "failed"]
        culprits = [rank for rank in failed if not told[rank].lost_connection]
        if not culprits and any(vote.outcome not in ("failed", "passed") for vote in votes):
            raise OutOfStep(desync.tell_outcomes(votes))
        first = (culprits or failed)[0]
        if len({each.choices for each in told}) > 1:
            self._take_over(attempt, votes[0].case, first)
        attempt.share(told)
        error = attempt.error if votes[self.rank].outcome == "failed" else None
        if error is None:
            error = PeerFailed(desync.tell_victim(culprits or failed))
        if (origin := told[first].origin) is not None:
            set_origin(error, origin)
        attempt.recorder.hand_over()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _take_over(self, attempt: Attempt, case: str, culprit: int) -> None:
        """Let the example be for all ranks what the culprit has drawn of it: others went on, or broke off."""
        __tracebackhide__ = True
        mine = attempt.keep() if self.rank == culprit else None
        kept = self.ask_all(f"what {case} has drawn", mine)
        if self.rank != culprit:
            attempt.take_over(kept[culprit])

    def _expect_all_alike(self, attempt: Attempt, votes: tuple[Vote, ...], told: list[ExampleResult]) -> None:
        __tracebackhide__ = True
        case = votes[0].case
        if len({each.choices for each in told}) > 1:
            drawn = self.ask_all(f"the draws of {case}", attempt.recorder.describe())
            raise OutOfStep(desync.tell_draws(case, drawn))
        if len({vote.outcome for vote in votes}) > 1:
            raise OutOfStep(desync.tell_outcomes(votes))

    # One run of a property

    def end_run(self) -> None:
        """Wait for the other ranks at the end of a property, unless one of them has ended it by itself."""
        __tracebackhide__ = True
        with contextlib.suppress(OutOfStep):
            self._agree(Vote(desync.END, "ended it", renews_deadline=True))

    def begin_run(self, name: str, facts: dict[str, str]) -> None:
        """Expect every rank to begin the same property, with the same seed and settings."""
        __tracebackhide__ = True
        self._run += 1
        self._count = 0
        digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
        case = f"the property {name}"
        if len(set(self.ask_all(case, digest))) > 1:
            told = self.ask_all(f"{case} in words", facts)
            raise OutOfStep(desync.tell_runs(case, told))
