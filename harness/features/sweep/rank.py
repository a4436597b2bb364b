"""A sweep on one rank: the undisturbed run, then each point, and the claim after each. Inside a rank."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.features.injection.expectation import OF_THE_RUN, is_lost, patient_waits
from lockstep.features.sweep.directories import Directories, owned
from lockstep.features.sweep.messages import (
    FEATURE,
    Begins,
    Claimed,
    FromRank,
    Joins,
    Left,
    Over,
    Plan,
    Ran,
    Recorded,
    Result,
    Resume,
)
from lockstep.features.sweep.points import Kind, Point
from lockstep.features.sweep.report import failing, headline, refusal
from lockstep.features.sweep.striker import Striker
from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_CASE, Agreed, Part, Vote
from lockstep.tracebacks import is_installed

if TYPE_CHECKING:
    from lockstep.features.injection.lost_peers import LostPeers
    from lockstep.rank.session import RankSession

__tracebackhide__ = True  # under pytest a failure points to the call

MOST_CHARACTERS = 300
"""Characters of an error that a report shows."""


@dataclass(frozen=True)
class Crash:
    """The fault before a claim.

    Attributes:
        kind: of the fault, "kill" say; None after the undisturbed run.
        rank: on which rank; None after the undisturbed run.
        point: name of the point, as `--sweep-point` takes it.
        errors: what the function has raised, by rank, in a line each; not of ranks that were killed.
    """

    kind: Kind | None = None
    rank: int | None = None
    point: str = "the undisturbed run"
    errors: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Functions:
    """The functions of a sweep."""

    save: Callable[[], object]
    then: Callable[[Crash], object]
    prepare: Callable[[], object]


class SweepFailed(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """Points of a sweep do not hold.

    Attributes:
        point: the smallest of them, None if there is none to run again.
    """

    __module__ = "builtins"  # as of pytest's own: reports then name the class alone

    def __init__(self, text: str, point: Point | None = None) -> None:
        super().__init__(text, pytrace=False)
        self.point = point


@dataclass
class _Error:
    """The exception that a function has raised; "" if none."""

    text: str = ""
    is_lost: bool = False


class RankSweep:
    """A sweep on one rank, from the call of the fixture to its end.

    Args:
        folders: absolute paths of the directories.
    """

    def __init__(
        self, session: RankSession, functions: Functions, folders: tuple[str, ...], lost_peers: LostPeers
    ) -> None:
        self._rank, self._functions, self._lost_peers = session.rank, functions, lost_peers
        self._number = session.rank.spec.rank
        assert session.order is not None, "an item runs"
        self._aside = Path(f"{session.order.shared_tmp_path}.sweep")
        self._resume: Resume | None = session.order.parts.get(FEATURE)
        self._kept = Path(tempfile.mkdtemp(prefix="sweep-", dir=session.rank.spec.directory))
        self._case = "the beginning of a sweep"
        votes = self._meet("joins", Joins(folders, os.getpid())).votes
        joined = [vote.more for vote in votes]
        self._striker = Striker(self._number, folders)
        self._striker.processes = tuple(each.process for each in joined)
        folders_of_all = [each.folders for each in joined]
        self._directories = Directories(owned(folders_of_all, self._number), self._kept / "before")

    def run(self, kinds: tuple[Kind, ...], part: tuple[int, int]) -> None:
        """Run all points; fail the test if one does not hold."""
        __tracebackhide__ = True
        self._aside.mkdir(parents=True, exist_ok=True)
        with self._striker.installed():
            if self._resume is None:
                plan, results, start = self._record(kinds, part), [], 0
            else:
                plan, start = self._resume.plan, self._resume.start
                results = [*self._resume.results, *self._claim_pending(plan)]
            self._striker.lag = plan.lag
            for index in range(start, len(plan.points)):
                result = self._run_point(index, plan.points[index])
                if result is None:
                    break
                results.append(result)
            self._case = "the end of a sweep"
            self._meet("over", Over())
        self._rank.end_case()
        if problems := failing(results, plan):
            raise SweepFailed(headline(results, plan), problems[0].point)
        if why := refusal(results, plan):
            raise SweepFailed(f"sweep: {why}")

    def end(self) -> None:
        """Remove the copies of the directories."""
        shutil.rmtree(self._kept, ignore_errors=True)

    def _meet(self, outcome: str, more: FromRank | None = None) -> Agreed:
        """Meet the others, all of which say the same kind of thing; the time of the test begins again."""
        __tracebackhide__ = True
        answer = self._rank.meet(Vote(self._case, outcome, more=more, renews_deadline=True))
        if ended := [str(rank) for rank, vote in enumerate(answer.votes) if vote.outcome == "ended"]:
            raise PeerFailed(f"{VICTIM_OF_A_CASE}rank {', '.join(ended)} {HAS_ENDED}")
        living = [vote for vote in answer.votes if vote.outcome != "died"]
        if len({type(vote.more) for vote in living}) > 1:
            where = ", ".join(f"rank {rank} at {vote.case}" for rank, vote in enumerate(answer.votes))
            raise RuntimeError(f"sweep: all ranks have to call it, and nothing else in its place; {where}")
        return answer

    # One run of the function

    def _prepare(self, case: str) -> None:
        """Put everything back, and wait for the others: none may write before all have."""
        __tracebackhide__ = True
        self._case = case
        self._lost_peers.clear()
        self._directories.put_back()
        self._meet("has put files back")
        self._rank.begin_case(case)
        self._functions.prepare()

    def _record(self, kinds: tuple[Kind, ...], part: tuple[int, int]) -> Plan:
        """Run the function undisturbed, and the claim after it, which must hold; return the plan."""
        __tracebackhide__ = True
        self._prepare("the undisturbed run of a sweep")
        self._meet("begins")
        begun = time.monotonic()
        with self._striker.records() as recording:
            self._functions.save()
        self._meet("has run")
        ran = time.monotonic()
        self._striker.has_read = False
        self._functions.then(Crash())
        recorded = Recorded(
            spots=recording.contended(),
            touched=frozenset(recording.touched),
            appeared=recording.appeared,
            kinds=kinds,
            seconds=ran - begun - recording.seconds_of_looks,
            claim_seconds=time.monotonic() - ran,
            reads=self._striker.has_read,
            part=part,
        )
        plan: Plan | str = self._meet("has claimed", recorded).parts[FEATURE]
        if isinstance(plan, str):
            raise SweepFailed(f"sweep: {plan}")
        return plan

    def _run_point(self, index: int, point: Point) -> Result | None:
        """Run the function under a fault, and the claim; return None where the time is over."""
        __tracebackhide__ = True
        self._prepare(str(point))
        if not self._meet("begins", Begins(index)).parts[FEATURE]:
            return None
        error = _Error()
        strikes = self._striker.strikes(point, str(self._aside / f"journal-{self._number}"))
        with self._catching(error), patient_waits(self._rank, self._lost_peers), strikes:
            self._functions.save()
        is_broken = self._rank.group.is_aborted
        ran = Ran(self._striker.has_struck, error.text, error.is_lost, is_broken)
        votes = self._meet("ran", ran).votes
        if any(vote.outcome == "died" for vote in votes):
            self._rank.abort()
            pytest.skip("the sweep continues on another world")
        said: list[Ran] = [vote.more for vote in votes]
        if any(each.error or each.is_broken for each in said):
            self._rank.repair()
        return self._claim(point, {rank: each.error for rank, each in enumerate(said) if each.error})

    @contextmanager
    def _catching(self, error: _Error) -> Iterator[None]:
        """Note what is raised inside, and close the connections then, which frees those that wait."""
        try:
            yield
        except BaseException as raised:  # `CheckpointException` of torch is no Exception
            if isinstance(raised, OF_THE_RUN):
                raise
            error.text, error.is_lost = _describe(raised), is_lost(raised)
            self._rank.abort()
            self._rank.wire.post(Part(FEATURE, Left()))

    # The claim

    def _claim_pending(self, plan: Plan) -> list[Result]:
        """Run the claim on what the last world has left, if it ended at a point as it was to."""
        assert self._resume is not None
        pending = self._resume.pending
        if pending is None:
            return []
        point = plan.points[pending.index]
        self._case = str(point)
        self._directories.take_over(pending.left)
        self._meet("begins", Begins(pending.index, only_claims=True))
        return [self._claim(point, pending.errors)]

    def _claim(self, point: Point, errors: Mapping[int, str]) -> Result:
        self._case = f"the claim after {point}"
        self._rank.begin_case(self._case)
        self._striker.has_read = False
        error = _Error()
        with self._catching(error), patient_waits(self._rank, self._lost_peers):
            self._functions.then(Crash(point.kind, point.rank, str(point), errors))
        is_broken = self._rank.group.is_aborted
        claimed = Claimed(self._striker.has_read, error.text, error.is_lost, is_broken)
        answer = self._meet("claimed", claimed)
        if any(vote.more.error or vote.more.is_broken for vote in answer.votes):
            self._rank.repair()
        result: Result = answer.parts[FEATURE]
        return result


def _describe(error: BaseException) -> str:
    """Return an exception in a line, with the user's line that has raised it."""
    text = next(iter(str(error).splitlines()), "")
    text = f"{text[:MOST_CHARACTERS]}..." if len(text) > MOST_CHARACTERS else text
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not is_installed(frame.filename)]
    where = f" at {os.path.relpath(places[-1].filename)}:{places[-1].lineno}" if places else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
