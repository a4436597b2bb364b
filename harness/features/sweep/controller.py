"""Sweeps in the controller: what happens to the ranks at each point, and the worlds after those that end.

Must not import torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import pytest

from lockstep.controller.rerun import rerun_line
from lockstep.features.sweep.directories import move_aside
from lockstep.features.sweep.journal import lose_unsynced
from lockstep.features.sweep.messages import (
    FEATURE,
    Begins,
    Claimed,
    FromRank,
    Joins,
    Left,
    Lost,
    Over,
    Pending,
    Plan,
    Ran,
    Recorded,
    Result,
    Resume,
)
from lockstep.features.sweep.parts import without_part
from lockstep.features.sweep.picture import draw
from lockstep.features.sweep.points import (
    HARMLESS,
    KILLS,
    OF_ONE,
    Point,
    Spot,
    choose,
    describe_spots,
    points_of,
)
from lockstep.features.sweep.report import Counts, count, table
from lockstep.features.timeline import PICTURES
from lockstep.protocol import Part, RunItem, Vote
from lockstep.reporting.rank_reports import Context
from lockstep.world.diagnosis import Diagnosis, place_of
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, ItemOutcome, Stuck

COUNTS = "sweep counts"
"""Name of the property of a report that has the numbers of a part of a sweep."""
WITHIN = 8.0
"""Seconds that a function gets at least: a collective of gloo may end 5 s after another rank was lost."""


@dataclass(frozen=True)
class Budget:
    """The limits of a sweep: options.

    Attributes:
        points: how many run at most; None for all.
        seconds: after which no further point begins; None without a limit.
        only: the one point to run; None for those that are drawn.
        seed: by which they are drawn.
    """

    points: int | None
    seconds: float | None
    only: Point | None
    seed: int


class Progress:
    """The progress of a sweep in one run of its item.

    Attributes:
        plan: its points, None before the undisturbed run is over.
        results: of the points that have run.
        is_over: whether all have.
    """

    def __init__(self, budget: Budget, resume: Resume | None) -> None:
        self._budget = budget
        self.plan: Plan | None = None if resume is None else resume.plan
        self.results: list[Result] = [] if resume is None else [*resume.results]
        self.is_over = False
        self._pending = None if resume is None else resume.pending
        self._index = -1
        self._runs = self._claims = False
        self._ran: dict[int, Ran] = {}
        self._killed: set[int] = set()
        self._hang = self._hang_of_claim = ""
        self.folders: tuple[tuple[str, ...], ...] = ()

    @property
    def point(self) -> Point:
        """The point that has begun last."""
        assert self.plan is not None
        return self.plan.points[self._index]

    def meet(self, run: ItemRun, said: dict[int, FromRank]) -> Any:
        """Take what all ranks have said; return the answer to them."""
        first = next(iter(said.values()))
        match first:
            case Joins():
                self.folders = tuple(each.folders for each in said.values() if isinstance(each, Joins))
            case Recorded():
                recorded = [each for each in said.values() if isinstance(each, Recorded)]
                made = make_plan(recorded, self._budget)
                self.plan = made if isinstance(made, Plan) else None
                return made
            case Begins():
                return self._begin(run, first)
            case Ran():
                self._ran = {rank: each for rank, each in said.items() if isinstance(each, Ran)}
                if len(said) == len(run.outcomes):
                    self._runs, self._claims = False, True
                    self._limit(run)
            case Claimed():
                claimed = {rank: each for rank, each in said.items() if isinstance(each, Claimed)}
                result = self._judge(claimed)
                self.results.append(result)
                self._claims = False
                return result
            case Over():
                self.is_over = True
            case _:
                assert_never(first)
        return None

    def _begin(self, run: ItemRun, begins: Begins) -> bool:
        """Note which point begins; return whether there is time for it."""
        assert self.plan is not None
        if not begins.only_claims and time.time() >= self.plan.until:
            return False
        self._index, self._killed, self._ran = begins.index, set(), {}
        self._hang = self._hang_of_claim = ""
        self._runs, self._claims = not begins.only_claims, begins.only_claims
        if begins.only_claims:
            assert self._pending is not None
            self._hang = self._pending.problem
            # Killed ranks have said nothing, and that is how the fault is known to have struck.
            self._ran = {self.point.rank: Ran(has_struck=True)}
        self._limit(run)
        return True

    def _limit(self, run: ItemRun) -> None:
        assert self.plan is not None
        run.clock.deadline = min(run.clock.deadline, time.monotonic() + self.plan.within)

    def _judge(self, claimed: dict[int, Claimed]) -> Result:
        ran = self._ran.get(self.point.rank)
        claim = self._hang_of_claim
        if not claim and any(each.error for each in claimed.values()):
            claim = f"the claim failed: {_cause(claimed)}"
        if self._hang:
            problem = f"{self._hang}; then {claim or 'the claim held'}"
        elif self.point.kind in HARMLESS and any(each.error for each in self._ran.values()):
            problem = f"the function failed, though nothing is broken: {_cause(self._ran)}"
        else:
            problem = claim
        reads = any(each.reads for each in claimed.values())
        return Result(self.point, problem, ran is not None and ran.has_struck, reads)

    # Ranks that die or stand still

    def excuse(self, run: ItemRun, rank: int) -> str | None:
        """Return words for the death of a rank that the point ends."""
        if not self._runs or self.point.kind not in KILLS:
            return None
        if self.point.kind in OF_ONE and rank != self.point.rank:
            return None
        self._killed.add(rank)
        self.lose(run, rank)
        return "as the sweep does"

    def lose(self, run: ItemRun, lost: int) -> None:
        """Let the others know that a rank closes its connections."""
        for outcome in run.outcomes:
            if outcome.fate is None and outcome.vote is None and outcome.rank != lost:
                run.send(outcome.rank, Part(FEATURE, Lost(lost)))

    def note_standstill(self, found: Diagnosis) -> None:
        if found.is_hopeless and self._runs:
            self._hang = f"a hang: {self._worded(found.sentence)}"
        elif found.is_hopeless and self._claims:
            self._hang_of_claim = f"the claim hung: {self._worded(found.sentence)}"

    def _worded(self, text: str) -> str:
        """Return words of a diagnosis, where a point is no subtest."""
        for case in (f"the claim after {self.point}", str(self.point)):
            text = text.replace(f" the subtest [{case}]", " it").replace(f" [{case}]", "")
        return text

    # The end of a world

    def resume(self, order: RunItem, outcome: ItemOutcome) -> Resume | None:
        """Return how the sweep continues on another world; None where it is over, or the test has failed."""
        gone = [rank for rank in outcome.ranks if isinstance(rank.fate, Died | Stuck)]
        if self.plan is None or self.is_over or not gone or not (self._runs or self._claims):
            return None
        problem = self._problem(outcome)
        pending = None
        if problem and self._claims:
            before = f"{self._hang}; then " if self._hang else ""
            has_struck = bool(self._killed) or self.point.kind not in KILLS
            self.results.append(Result(self.point, before + problem, has_struck, reads=True))
        else:
            pending = self._leave(order, problem)
        return Resume(self.plan, tuple(self.results), self._index + 1, pending)

    def _problem(self, outcome: ItemOutcome) -> str:
        """Say what was wrong as the world ended, "" if the point was to end it."""
        what = "" if self._runs else "in the claim, "
        stuck = [rank for rank in outcome.ranks if isinstance(rank.fate, Stuck)]
        for rank in outcome.ranks:
            if isinstance(rank.fate, Died) and rank.rank not in self._killed:
                return f"{what}rank {rank.rank} {rank.fate.how}"
        hang = self._hang if self._runs else self._hang_of_claim
        if hang or not stuck:
            return hang
        if outcome.diagnosis is not None:
            return f"{what}a hang: {self._worded(outcome.diagnosis.sentence)}"
        assert self.plan is not None
        waiting = [rank for rank in stuck if _status(rank.fate).state != "votes"] or stuck
        where = [f"rank {rank.rank} is in {place_of(_status(rank.fate))}" for rank in waiting]
        return f"{what}a hang: after {self.plan.within:.0f} s {self._worded('; '.join(where))}"

    def _leave(self, order: RunItem, problem: str) -> Pending:
        """Put aside what the world has left."""
        aside = Path(f"{order.shared_tmp_path}.sweep")
        journals = [*aside.glob("journal-*")] if self.point.kind == "power" else []
        lose_unsynced(journals)
        for journal in journals:
            journal.unlink()
        left = move_aside(self.folders, aside / str(self._index))
        errors = {rank: each.error for rank, each in self._ran.items() if each.error}
        return Pending(self._index, errors, left, problem)


def _status(fate: object) -> Any:
    assert isinstance(fate, Stuck)
    return fate.status


def _cause(said: dict[int, Ran] | dict[int, Claimed]) -> str:
    """Return the error of the first rank that has one which is not of a lost connection, if any is."""
    failed = sorted((each.is_lost, rank, each.error) for rank, each in said.items() if each.error)
    _, rank, error = failed[0]
    return f"rank {rank}: {error}"


def make_plan(recorded: Sequence[Recorded], budget: Budget) -> Plan | str:
    """Return the points to run, or why there is nothing to run."""
    unseen = _unseen(recorded)
    spots = tuple(
        _after_unseen(spot, each.appeared.get(spot.place, frozenset()) & unseen)
        for each in recorded
        for spot in each.spots
    )
    if all(len(each.spots) == 1 for each in recorded):
        return (
            "the function has no point: it has called no collective, and no operation on a file below the "
            "directories was seen"
        )
    if not any(each.reads for each in recorded):
        return "the claim has not looked at anything below the directories"
    points = points_of(spots, recorded[0].kinds)
    if not points:
        return f"no fault of the kinds {', '.join(recorded[0].kinds)} makes a difference at any point"
    if (only := budget.only) is not None:
        if not any(only.is_at(spot) and only.kind in spot.kinds() for spot in spots):
            return f"--sweep-point '{only}': there is no such point; there are {describe_spots(spots)}"
        chosen = [only]
    else:
        number, parts = recorded[0].part
        chosen = choose(points, budget.points, budget.seed)[number::parts]
    seconds = max(each.seconds for each in recorded)
    longest = max(seconds, *(each.claim_seconds for each in recorded))
    until = float("inf") if budget.seconds is None else time.time() + budget.seconds
    return Plan(
        points=tuple(chosen),
        spots=tuple(spots),
        num_all=len(chosen) if budget.only is not None else len(points),
        within=WITHIN + 10 * longest,
        lag=0.1 + 2 * seconds,
        unseen=_names(unseen),
        until=until,
        num_parts=recorded[0].part[1],
    )


def _unseen(recorded: Sequence[Recorded]) -> frozenset[str]:
    """Return the paths of files that have changed, and that no rank was seen to write."""
    touched = frozenset[str]().union(*(each.touched for each in recorded))
    appeared = frozenset[str]().union(*(paths for each in recorded for paths in each.appeared.values()))
    return appeared - touched


def _names(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({Path(path).name for path in paths}))


def _after_unseen(spot: Spot, paths: frozenset[str]) -> Spot:
    """Return a moment with the files in its text that code which is not seen has written just before."""
    if not paths:
        return spot
    written = f"a write by C++ of {', '.join(_names(paths))} (seen by polling)"
    return replace(spot, text=f"{spot.text}; after {written}")


class Sweeps:
    """The sweeps of a controller: a plugin of it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def pytest_ranks_agreed(self, run: ItemRun, votes: Sequence[Vote], parts: dict[str, Any]) -> None:
        said = {
            rank: vote.more
            for rank, vote in enumerate(votes)
            if vote.outcome != "died" and isinstance(vote.more, FromRank)
        }
        living = sum(vote.outcome != "died" for vote in votes)
        if said and len(said) == living and len({type(each) for each in said.values()}) == 1:
            parts[FEATURE] = self._progress(run).meet(run, said)

    def _progress(self, run: ItemRun) -> Progress:
        if FEATURE not in run.parts:
            run.parts[FEATURE] = Progress(self._budget, run.order.parts.get(FEATURE))
        progress: Progress = run.parts[FEATURE]
        return progress

    def pytest_ranks_message(self, run: ItemRun, rank: int, part: Part) -> None:
        if part.feature == FEATURE and isinstance(part.data, Left):
            self._progress(run).lose(run, rank)

    def pytest_ranks_died(self, run: ItemRun, rank: int, death: Died) -> str | None:
        return self._progress(run).excuse(run, rank) if FEATURE in run.parts else None

    def pytest_ranks_standstill(self, run: ItemRun, found: Diagnosis) -> None:
        if FEATURE in run.parts:
            self._progress(run).note_standstill(found)

    def pytest_ranks_again(
        self, order: RunItem, outcome: ItemOutcome, run: Callable[[RunItem], ItemOutcome]
    ) -> ItemOutcome | None:
        """Run a test again from the point on at which its world has ended, until all points have run."""
        last: ItemOutcome | None = None
        try:
            while (resume := _resume(order, last or outcome)) is not None:
                last = run(replace(order, parts={**order.parts, FEATURE: resume}))
        finally:
            if FEATURE in outcome.parts:
                shutil.rmtree(f"{order.shared_tmp_path}.sweep", ignore_errors=True)
        return last

    def pytest_ranks_sections(self, context: Context) -> tuple[str, str] | None:
        """List the points that do not hold."""
        progress: Progress | None = context.outcome.parts.get(FEATURE)
        if progress is None or progress.plan is None or not any(each.problem for each in progress.results):
            return None
        return "sweep", table(progress.results, progress.plan, rerun_line(context.item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_ranks_reported(self, outcome: ItemOutcome, reports: list[pytest.TestReport]) -> None:
        """Note in the last report how many points held, and draw them for the page of a timeline."""
        progress: Progress | None = outcome.parts.get(FEATURE)
        if progress is not None and progress.plan is not None and progress.results and reports:
            counts = count(progress.results, progress.plan)
            reports[-1].user_properties.append((FEATURE, str(counts)))
            if progress.plan.num_parts > 1:
                reports[-1].user_properties.append((COUNTS, asdict(counts)))
            title = f"Points of the sweep: {counts}"
            outcome.parts.setdefault(PICTURES, []).append((title, draw(progress.results, progress.plan)))


def _resume(order: RunItem, outcome: ItemOutcome) -> Resume | None:
    progress: Progress | None = outcome.parts.get(FEATURE)
    return None if progress is None else progress.resume(order, outcome)


def lines(reports: Iterable[Any]) -> list[str]:
    """Return what the end of a run says of its sweeps, of which workers may have run a part each."""
    totals: dict[str, Counts | str] = {}
    for report in reports:
        properties = dict(getattr(report, "user_properties", ()))
        if FEATURE not in properties or report.when != "teardown":
            continue
        name, part = without_part(report.nodeid), properties.get(COUNTS)
        if part is None:
            totals[name] = properties[FEATURE]
        else:
            counts, before = Counts(**part), totals.get(name)
            totals[name] = before + counts if isinstance(before, Counts) else counts
    return [f"sweep {name}: {total}" for name, total in totals.items()]
