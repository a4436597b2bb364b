"""The examples of one rank, kept in step with those of the other ranks. Runs inside a rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.exceptions import PeerFailed
from lockstep.features.properties import desync
from lockstep.features.properties.attempt import Attempt, Body, Runner
from lockstep.features.properties.crashed import CrashGuard
from lockstep.features.properties.desync import EndedByOthers, OutOfStep
from lockstep.features.properties.hypothesis_internals import (
    ConjectureData,
    seed_engines,
    set_origin,
    unexplained,
)
from lockstep.features.properties.messages import ExampleResult, RunningExampleFile, Search
from lockstep.protocol import TRIAL, VICTIM_OF_A_TRIAL, Vote
from lockstep.rank.torch_internals import count_collectives, count_groups

if TYPE_CHECKING:
    from lockstep.rank.process import Rank

__hypothesistracebackhide__ = True  # frames of ours do not belong into a failure's traceback

ABORT_AFTER = 0.03
"""Seconds that a rank that has failed waits for the others before it frees those that wait for it."""

MAX_HUNG = 20.0
"""Seconds that examples in which no rank could continue may take in all, before the search ends."""


class LockstepClock:
    """A clock that moves only with votes, which carry the time of rank 0. It replaces `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Examples:
    """Runs examples so that all ranks pass, fail, reject and skip them together."""

    def __init__(self, rank: Rank, records: bool) -> None:
        self.rank = rank.spec.rank
        self.clock = LockstepClock()
        self.is_active = False
        self.seed: int | None = None
        """The seed that reproduces the failure of this test, where no database keeps it."""
        self.running = RunningExampleFile(rank.spec.path_of("running"))
        self.crash_guard = CrashGuard(self.running)
        self._rank = rank
        self._records = records
        self._run = self._count = self._total = 0
        self._began = 0.0
        self._continues = True
        self._hung = 0.0

    def wrap_body(self, test: Callable[..., object]) -> Callable[..., object]:
        """Return the body of a property, in the context that another feature has for an example."""

        @functools.wraps(test)
        def body(*args: Any, **kwargs: Any) -> object:
            __tracebackhide__ = True
            with self._rank.hook.pytest_ranks_example() or contextlib.nullcontext():
                return test(*args, **kwargs)

        return body

    def begin_item(self, search: Search) -> None:
        """Start a test in which ranks keep in step."""
        self.is_active = True
        self.seed = None
        self._run = self._count = self._total = 0
        self._began = time.monotonic()
        self._continues = search.continues
        self._hung = 0.0
        self.clock.now = 0.0
        self.crash_guard.begin_item(search.crashed)
        seed_engines(search.entropy)

    def must_stop(self) -> bool:
        """Return whether the search for smaller examples must end: examples of this test cost too much."""
        return self._hung > MAX_HUNG or (self.crash_guard.has_met_last and not self._continues)

    def recorded(self) -> contextlib.AbstractContextManager[object]:
        """Record what an example computes, so that its failure shows where runs or ranks part first."""
        if not self._records:
            return contextlib.nullcontext()
        from lockstep.recorders import ExecutionLog

        return ExecutionLog(self._rank.spec.session.cwd)

    def run(self, runner: Runner, data: ConjectureData, function: Body) -> object:
        """Run an example where Hypothesis would call `runner(data, function)`; all ranks do.

        Raises:
            PeerFailed: it failed on another rank.
            OutOfStep: ranks drew or decided differently.
            BaseException: any exception of the example on this rank.
        """
        __tracebackhide__ = True
        self._count += 1
        self._total += 1
        case = f"{TRIAL}{self._total}"
        attempt = Attempt(data, self.running, self.crash_guard)
        self._rank.begin_case(case, case)
        self.running.begin(self._run, self._count)
        attempt.run(runner, function)
        with unexplained():  # that ranks free and meet each other after a failure does not explain it
            votes, results = self._vote(attempt, case)
            self.running.end()
            has_failed = any(vote.outcome == "failed" for vote in votes)
            if has_failed:
                self._repair(case)
        if has_failed:
            self._fail(attempt, votes, results)
        self._expect_all_alike(attempt, votes, results)
        attempt.share(results)
        attempt.recorder.hand_over()
        if attempt.error is not None:
            raise attempt.error
        return attempt.result

    def _vote(self, attempt: Attempt, case: str) -> tuple[tuple[Vote, ...], list[ExampleResult]]:
        __tracebackhide__ = True
        vote = attempt.vote(case, time.monotonic() - self._began)
        votes = self._agree(vote, ABORT_AFTER if vote.outcome == "failed" else None)
        results = [ExampleResult.unpack(each.more) for each in votes]
        before, self.clock.now = self.clock.now, results[0].seconds
        failures = [result for result in results if result.origin is not None]
        if failures and all(result.lost_connection for result in failures):
            self._hung += self.clock.now - before
        return votes, results

    def _agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]:
        """Vote. Raise `EndedByOthers` if another rank has ended the test, `OutOfStep` if it is elsewhere."""
        __tracebackhide__ = True
        votes = self._rank.agree(vote, abort_after)
        # Only an error outside of examples makes a rank end its property before the others do.
        if any(other.outcome == "ended" or vote.case != other.case == desync.END for other in votes):
            raise EndedByOthers(desync.describe_places(votes))
        if any(other.case != vote.case for other in votes):
            raise OutOfStep(desync.describe_places(votes))
        return votes

    def exchange(self, case: str, value: object) -> list[Any]:
        """Send a value to all ranks; return the values of all, in rank order."""
        __tracebackhide__ = True
        return [vote.more for vote in self._agree(Vote(case, "exchanged", "", value, renews_deadline=True))]

    def _repair(self, case: str) -> None:
        """Meet the other ranks in a new process group, unless the failure has left this one intact."""
        __tracebackhide__ = True
        own = self._rank.group.is_aborted, count_collectives(), count_groups()
        states = self.exchange(f"the end of {case}", own)
        if any(is_aborted for is_aborted, _, _ in states) or len(set(states)) > 1:
            self._rank.repair()

    def _fail(self, attempt: Attempt, votes: tuple[Vote, ...], results: list[ExampleResult]) -> None:
        """Raise this rank's failure of an example that failed on at least one rank."""
        __tracebackhide__ = True
        failed = [rank for rank, vote in enumerate(votes) if vote.outcome == "failed"]
        culprits = [rank for rank in failed if not results[rank].lost_connection]
        if not culprits and any(vote.outcome not in ("failed", "passed") for vote in votes):
            raise OutOfStep(desync.describe_outcomes(votes))
        first = (culprits or failed)[0]
        if len({result.choices for result in results}) > 1:
            self._take_over(attempt, votes[0].case, first)
        attempt.share(results)
        error = attempt.error if votes[self.rank].outcome == "failed" else None
        if error is None:
            error = PeerFailed(f"{VICTIM_OF_A_TRIAL}rank {', '.join(map(str, culprits or failed))}")
        if (origin := results[first].origin) is not None:
            set_origin(error, origin)
        attempt.recorder.hand_over()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _take_over(self, attempt: Attempt, case: str, culprit: int) -> None:
        """Give the example the culprit's draws on all ranks: the others drew more, or stopped early."""
        __tracebackhide__ = True
        mine = attempt.keep() if self.rank == culprit else None
        kept = self.exchange(f"what {case} has drawn", mine)
        if self.rank != culprit:
            attempt.take_over(kept[culprit])

    def _expect_all_alike(
        self, attempt: Attempt, votes: tuple[Vote, ...], results: list[ExampleResult]
    ) -> None:
        __tracebackhide__ = True
        case = votes[0].case
        if len({result.choices for result in results}) > 1:
            drawn = self.exchange(f"the draws of {case}", attempt.recorder.describe())
            raise OutOfStep(desync.describe_draws(case, drawn))
        if len({vote.outcome for vote in votes}) > 1:
            raise OutOfStep(desync.describe_outcomes(votes))

    def begin_run(self, name: str, facts: dict[str, str]) -> None:
        """Expect every rank to begin the same property, with the same seed and settings."""
        __tracebackhide__ = True
        self._run += 1
        self._count = 0
        digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
        case = f"the property {name}"
        if len(set(self.exchange(case, digest))) > 1:
            of_ranks = self.exchange(f"{case} in words", facts)
            raise OutOfStep(desync.describe_settings(case, of_ranks))

    def end_run(self) -> None:
        """Wait for the other ranks at the end of a property, unless one of them has ended it alone."""
        __tracebackhide__ = True
        with contextlib.suppress(OutOfStep):
            self._agree(Vote(desync.END, "ended it", renews_deadline=True))
