"""The progress of a sweep in the controller: what ranks say, die of and wait for, and how it goes on."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.sweep.controller import Budget, Progress, Sweeps, lines
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
from lockstep.features.sweep.points import Kind, Point, Spot
from lockstep.features.sweep.report import Counts
from lockstep.protocol import Part, RankStatus, RunItem, Vote
from lockstep.world.clock import Clock
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, Finished, ItemOutcome, RankOutcome, Stuck

BUDGET = Budget(None, None, None, 0)
DIED = Died(-9, "", 0.0)
HANG = Diagnosis("rank 1 waits in the subtest [{}]", frozenset(), is_hopeless=True)


def stuck(where: str, state: Any = "runs", case: str = "") -> Stuck:
    return Stuck(RankStatus("", where, state=state, case=case), 0.0)


class Running:
    """A run of an item on three ranks, and a sweep of it whose one point begins."""

    def __init__(self, kind: Kind = "kill", rank: int = 1, problem: str | None = None) -> None:
        self.point = Point(kind, rank, "write", 1)
        plan = Plan((self.point,), (Spot(rank, "write", 1, 0, ""),), 1, 12.0, 0.0, (), float("inf"))
        pending = None if problem is None else Pending(0, {}, {}, problem)
        self.progress = Progress(BUDGET, Resume(plan, (), 0, pending))
        self.sent: list[tuple[int, object]] = []
        self.ranks = tuple(RankOutcome(rank) for rank in range(3))
        self.run: Any = SimpleNamespace(outcomes=self.ranks, clock=Clock(600), send=self._send)
        assert self.progress.meet(self.run, dict.fromkeys(range(3), Begins(0, pending is not None)))

    def _send(self, rank: int, part: Part) -> None:
        assert part.feature == FEATURE
        self.sent.append((rank, part.data))

    def meet(self, *said: FromRank) -> Any:
        return self.progress.meet(self.run, dict(enumerate(said)))

    def hang(self, case: str) -> None:
        words = HANG.sentence.format(case)
        self.progress.note_standstill(Diagnosis(words, frozenset(), is_hopeless=True))

    def resume(self, folder: Path, *fates: Any, diagnosis: Diagnosis | None = None) -> Resume | None:
        for rank, fate in zip(self.ranks, fates, strict=True):
            rank.fate = fate
        outcome = ItemOutcome(self.ranks, 1.0, False, 1.0, diagnosis=diagnosis)
        order = RunItem("test_x.py::test_y", "test_x.py", None, str(folder / "shared"))
        return self.progress.resume(order, outcome)


FINISHED = Finished(True, 0, 0)


def test_a_failed_claim_is_quoted_from_a_rank_that_lost_no_other() -> None:
    running = Running()
    running.meet(Ran(False), Ran(True), Ran(False))
    result = running.meet(Claimed(False, "lost", is_lost=True), Claimed(True), Claimed(False, "mine"))
    assert result == Result(running.point, "the claim failed: rank 2: mine", True, reads=True)
    assert running.progress.results == [result]
    held = running.meet(*[Claimed(False)] * 3)
    assert held == Result(running.point, "", True, reads=False)


@pytest.mark.parametrize(("kind", "is_refused"), [("delay", True), ("order", True), ("fail", False)])
def test_a_function_may_fail_only_where_something_is_broken(kind: Kind, is_refused: bool) -> None:
    running = Running(kind)
    running.meet(Ran(False, "ValueError: x"), Ran(False), Ran(False))
    result = running.meet(*[Claimed(True)] * 3)
    said = "the function failed, though nothing is broken: rank 0: ValueError: x"
    assert (result.problem, result.has_struck) == (said if is_refused else "", False)
    again = Running(kind)
    again.meet(*[Ran(False)] * 3)
    assert again.meet(*[Claimed(True)] * 3).problem == ""


def test_each_half_of_a_point_has_the_seconds_of_the_plan() -> None:
    running = Running()
    within = running.run.clock.deadline - time.monotonic()
    assert 11 < within <= 12
    running.run.clock.deadline = 0.0
    running.meet(*[Ran(True)] * 3)
    assert running.run.clock.deadline == 0.0


def test_a_sweep_is_over_once_its_ranks_say_so(tmp_path: Path) -> None:
    running = Running()
    assert not running.progress.is_over
    assert running.meet(*[Over()] * 3) is None
    assert running.progress.is_over
    assert running.resume(tmp_path, DIED, FINISHED, FINISHED) is None


def test_only_the_point_of_the_sweep_excuses_a_death() -> None:
    alone = Running("torn")
    assert alone.progress.excuse(alone.run, 0) is None
    assert alone.progress.excuse(alone.run, 1) == "as the sweep does"
    assert alone.sent == [(0, Lost(1)), (2, Lost(1))]
    together = Running("all")
    together.ranks[0].fate = DIED
    assert [together.progress.excuse(together.run, rank) for rank in (0, 1)] == ["as the sweep does"] * 2
    assert together.sent == [(1, Lost(0)), (2, Lost(0)), (2, Lost(1))]
    together.meet(*[Ran(True)] * 3)
    assert together.progress.excuse(together.run, 2) is None
    assert (fails := Running("fail")).progress.excuse(fails.run, 1) is None


def test_a_rank_that_has_left_the_function_hears_of_no_loss() -> None:
    running = Running()
    running.ranks[2].vote = Vote("", "ran")
    running.progress.lose(running.run, 0)
    assert running.sent == [(1, Lost(0))]


def test_a_hang_is_described_without_the_name_of_the_point() -> None:
    running = Running("fail")
    running.progress.note_standstill(Diagnosis("slow", frozenset(), is_hopeless=False))
    running.hang("fail rank 1 write 1")
    running.meet(*[Ran(True)] * 3)
    running.progress.note_standstill(Diagnosis("slow", frozenset(), is_hopeless=False))
    assert running.meet(*[Claimed(True)] * 3).problem == "a hang: rank 1 waits in it; then the claim held"
    of_claim = Running("fail")
    of_claim.meet(*[Ran(True)] * 3)
    of_claim.hang("the claim after fail rank 1 write 1")
    assert of_claim.meet(*[Claimed(True, "x")] * 3).problem == "the claim hung: rank 1 waits in it"
    assert of_claim.progress.results[-1].has_struck
    between = Running("fail")
    between.meet(*[Ran(True)] * 3)
    between.meet(*[Claimed(True)] * 3)
    between.hang("x")
    assert between.meet(*[Claimed(True)] * 3).problem == ""


def test_a_hang_before_the_end_of_a_world_is_reported_with_its_claim() -> None:
    running = Running("torn", problem="a hang: x")
    assert running.progress.excuse(running.run, 1) is None
    result = running.meet(*[Claimed(True, "y")] * 3)
    assert result.problem == "a hang: x; then the claim failed: rank 0: y"
    assert result.has_struck
    assert Running("torn", problem="").meet(*[Claimed(True)] * 3) is not None


def test_a_sweep_goes_on_only_behind_a_rank_that_died_or_hung(tmp_path: Path) -> None:
    assert Running().resume(tmp_path, FINISHED, FINISHED, FINISHED) is None
    idle = Running()
    idle.meet(*[Ran(True)] * 3)
    idle.meet(*[Claimed(True)] * 3)
    assert idle.resume(tmp_path, FINISHED, DIED, FINISHED) is None
    without = Progress(BUDGET, None)
    outcome = ItemOutcome(idle.ranks, 1.0, False, 1.0)
    order = RunItem("test_x.py::test_y", "test_x.py", None, str(tmp_path / "shared"))
    assert without.resume(order, outcome) is None
    assert (without.results, without.is_over, without.folders) == ([], False, ())


def test_a_world_that_ended_as_it_was_to_is_claimed_on_the_next(tmp_path: Path) -> None:
    running, folder = Running(), tmp_path / "files"
    folder.mkdir()
    (folder / "x").write_text("left")
    running.meet(*[Joins((str(folder),), 1)] * 3)
    assert running.progress.folders == ((str(folder),),) * 3
    running.progress.excuse(running.run, 1)
    running.progress.meet(running.run, {0: Ran(True, "lost"), 2: Ran(True)})
    resume = running.resume(tmp_path, FINISHED, DIED, FINISHED)
    assert resume is not None
    assert (resume.plan, resume.results, resume.start) == (running.progress.plan, (), 1)
    left = {"0/0": str(tmp_path / "shared.sweep" / "0" / "0/0")}
    assert resume.pending == Pending(0, {0: "lost"}, left, "")
    assert os.listdir(left["0/0"]) == ["x"]


def test_a_loss_of_power_ends_the_journals_of_its_world(tmp_path: Path) -> None:
    notes = tmp_path / "shared.sweep" / "journal-0"
    notes.parent.mkdir()
    for kind, is_there in (("kill", True), ("power", False)):
        notes.write_text(f'[1, "write", "{tmp_path}/x", "", 4]\n')
        (tmp_path / "x").write_text("data")
        running = Running("kill" if kind == "kill" else "power")
        running.progress.excuse(running.run, 1)
        assert running.resume(tmp_path, FINISHED, DIED, FINISHED) is not None
        assert notes.exists() is is_there
        assert (tmp_path / "x").read_text() == ("data" if is_there else "")


@pytest.mark.parametrize(
    ("fates", "problem"),
    [
        ((DIED, FINISHED, FINISHED), "rank 0 died: SIGKILL"),
        ((stuck("a.py:1 in f"), FINISHED, DIED), "rank 2 died: SIGKILL"),
        ((stuck("a.py:1 in f"), FINISHED, FINISHED), "a hang: after 12 s rank 0 is in a.py:1 in f"),
        (
            (stuck("a.py:1 in f", "votes"), stuck("b.py:2 in g", case="kill rank 1 write 1"), stuck("c")),
            "a hang: after 12 s rank 1 is in b.py:2 in g; rank 2 is in c",
        ),
        (
            (stuck("a.py:1 in f", "votes", "x"), FINISHED, FINISHED),
            "a hang: after 12 s rank 0 is in the wait for other ranks after [x]",
        ),
    ],
)
def test_a_world_that_ended_otherwise_is_a_problem(
    tmp_path: Path, fates: tuple[Any, ...], problem: str
) -> None:
    running = Running()
    resume = running.resume(tmp_path, *fates)
    assert resume is not None
    assert resume.pending is not None
    assert (resume.pending.problem, resume.results) == (problem, ())
    claims = Running()
    claims.meet(*[Ran(True)] * 3)
    resume = claims.resume(tmp_path / "other", *fates)
    assert resume is not None
    (result,) = resume.results
    assert result == Result(claims.point, f"in the claim, {problem}", False, reads=True)
    assert (resume.pending, resume.start) == (None, 1)


def test_a_diagnosis_is_quoted_before_the_places_of_ranks(tmp_path: Path) -> None:
    fates = (stuck("a.py:1 in f"), FINISHED, FINISHED)
    diagnosis = Diagnosis("rank 0 waits [kill rank 1 write 1]", frozenset(), is_hopeless=False)
    resume = Running().resume(tmp_path, *fates, diagnosis=diagnosis)
    assert resume is not None
    assert resume.pending is not None
    assert resume.pending.problem == "a hang: rank 0 waits"
    noted = Running("fail")
    noted.hang("x")
    noted.meet(*[Ran(True)] * 3)
    noted.hang("the claim after fail rank 1 write 1")
    resume = noted.resume(tmp_path / "other", *fates)
    assert resume is not None
    (result,) = resume.results
    said = "a hang: rank 1 waits in the subtest [x]; then the claim hung: rank 1 waits in it"
    assert (result.problem, result.has_struck) == (said, True)


def sweeps_of(running: Running) -> tuple[Sweeps, Any]:
    run: Any = SimpleNamespace(parts={FEATURE: running.progress}, **vars(running.run))
    return Sweeps(BUDGET), run


def test_ranks_meet_once_all_that_live_say_the_same() -> None:
    running = Running("all")
    sweeps, run = sweeps_of(running)
    votes = [
        Vote("", "claimed", more=Claimed(True)),
        Vote("", "died"),
        Vote("", "claimed", more=Claimed(True)),
    ]
    running.meet(*[Ran(True)] * 3)
    parts: dict[str, Any] = {}
    for others in ([votes[0], Vote("", "x"), votes[2]], [votes[0], Vote("", "x", more=Over()), votes[2]]):
        sweeps.pytest_ranks_agreed(run, others, parts)
    sweeps.pytest_ranks_agreed(run, [Vote("", "died")] * 3, parts)
    assert parts == {}
    sweeps.pytest_ranks_agreed(run, votes, parts)
    assert parts == {FEATURE: Result(running.point, "", True, reads=True)}


def test_others_hear_of_a_rank_that_has_left_the_function() -> None:
    running = Running()
    sweeps, run = sweeps_of(running)
    sweeps.pytest_ranks_message(run, 0, Part("other", Left()))
    sweeps.pytest_ranks_message(run, 0, Part(FEATURE, Lost(1)))
    assert running.sent == []
    sweeps.pytest_ranks_message(run, 0, Part(FEATURE, Left()))
    assert running.sent == [(1, Lost(0)), (2, Lost(0))]


def test_a_sweep_hears_of_deaths_and_standstills() -> None:
    running = Running()
    sweeps, run = sweeps_of(running)
    assert sweeps.pytest_ranks_died(run, 1, DIED) == "as the sweep does"
    assert sweeps.pytest_ranks_died(run, 0, DIED) is None
    sweeps.pytest_ranks_standstill(run, HANG)
    running.meet(*[Ran(True)] * 3)
    assert running.meet(*[Claimed(True)] * 3).problem.startswith("a hang: rank 1 waits")


def test_a_rank_that_died_says_nothing_more() -> None:
    running = Running()
    sweeps, run = sweeps_of(running)
    parts: dict[str, Any] = {}
    votes = [Vote("", "died", more=Over()), Vote("", "ran", more=Ran(True)), Vote("", "ran", more=Ran(True))]
    sweeps.pytest_ranks_agreed(run, votes, parts)
    assert parts == {FEATURE: None}
    assert not running.progress.is_over
    sweeps.pytest_ranks_agreed(run, [Vote("", "ended", more="other")] * 3, parts := {})
    assert parts == {}


def test_a_run_without_a_sweep_is_left_alone(tmp_path: Path) -> None:
    sweeps, run = Sweeps(BUDGET), SimpleNamespace(parts={})
    assert sweeps.pytest_ranks_died(run, 0, DIED) is None  # type: ignore[arg-type]
    sweeps.pytest_ranks_standstill(run, HANG)  # type: ignore[arg-type]
    folder = tmp_path / "shared.sweep"
    folder.mkdir()
    order = RunItem("test_x.py::test_y", "test_x.py", None, str(tmp_path / "shared"))
    runs: list[RunItem] = []
    for parts in ({}, {FEATURE: Progress(BUDGET, None)}):
        assert folder.exists()
        outcome = ItemOutcome((), 1.0, False, 1.0, parts=parts)
        assert sweeps.pytest_ranks_again(order, outcome, runs.append) is None  # type: ignore[arg-type]
    assert (folder.exists(), runs) == (False, [])
    assert sweeps.pytest_ranks_again(order, outcome, runs.append) is None  # type: ignore[arg-type]


def ended(running: Running, *fates: Any) -> ItemOutcome:
    """Return the outcome of a world in which ranks ended so."""
    for rank, fate in zip(running.ranks, fates, strict=True):
        rank.fate = fate
    return ItemOutcome(running.ranks, 1.0, False, 1.0, parts={FEATURE: running.progress})


def test_a_sweep_runs_on_other_worlds_until_all_points_have_run(tmp_path: Path) -> None:
    order = RunItem("test_x.py::test_y", "test_x.py", None, str(tmp_path / "shared"), parts={"other": 1})
    folder = tmp_path / "shared.sweep"
    folder.mkdir()
    first, second, last = Running(), Running(), Running()
    for each in (first, second):
        each.progress.excuse(each.run, 1)
    last.meet(*[Over()] * 3)
    outcomes = [ended(second, FINISHED, DIED, FINISHED), ended(last, FINISHED, FINISHED, FINISHED)]
    ran: list[RunItem] = []

    def run(given: RunItem) -> ItemOutcome:
        assert folder.exists()
        ran.append(given)
        return outcomes[len(ran) - 1]

    sweeps = Sweeps(BUDGET)
    assert sweeps.pytest_ranks_again(order, ended(first, FINISHED, DIED, FINISHED), run) is outcomes[1]
    assert [each.parts["other"] for each in ran] == [1, 1]
    assert [each.parts[FEATURE].start for each in ran] == [1, 1]
    assert order.parts == {"other": 1}
    assert not folder.exists()


def test_what_a_sweep_has_put_aside_goes_also_where_no_world_starts(tmp_path: Path) -> None:
    order = RunItem("test_x.py::test_y", "test_x.py", None, str(tmp_path / "shared"))
    folder = tmp_path / "shared.sweep"
    folder.mkdir()
    running = Running()
    running.progress.excuse(running.run, 1)

    def run(_: RunItem) -> ItemOutcome:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        Sweeps(BUDGET).pytest_ranks_again(order, ended(running, FINISHED, DIED, FINISHED), run)
    assert not folder.exists()


def test_points_that_do_not_hold_are_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.features.sweep.controller.rerun_line", lambda item: f"pytest {item}")

    def section(parts: dict[str, Any]) -> tuple[str, str] | None:
        outcome = ItemOutcome((), 1.0, False, 1.0, parts=parts)
        return Sweeps(BUDGET).pytest_ranks_sections(SimpleNamespace(outcome=outcome, item="x"))  # type: ignore[arg-type]

    assert section({}) is None
    assert section({FEATURE: Progress(BUDGET, None)}) is None
    running = Running("fail")
    parts = {FEATURE: running.progress}
    assert section(parts) is None
    running.meet(*[Ran(True)] * 3)
    running.meet(*[Claimed(True)] * 3)
    assert section(parts) is None
    running.progress.results.append(Result(running.point, "lost", True))
    found = section(parts)
    assert found is not None
    assert found[0] == "sweep"
    assert "    lost" in found[1]
    assert "pytest x" in found[1]
    running.progress.plan = None
    assert section(parts) is None


def test_a_part_of_a_sweep_reports_its_numbers() -> None:
    running = Running()
    running.meet(*[Ran(True)] * 3)
    running.meet(*[Claimed(True)] * 3)
    assert running.progress.plan is not None
    running.progress.plan = replace(running.progress.plan, num_parts=2)
    outcome = ItemOutcome((), 1.0, False, 1.0, parts={FEATURE: running.progress})
    reports: Any = [SimpleNamespace(user_properties=[]), SimpleNamespace(user_properties=[])]
    Sweeps(BUDGET).pytest_ranks_reported(outcome, reports)
    (_, text), (name, numbers) = reports[1].user_properties
    assert (reports[0].user_properties, name) == ([], "sweep counts")
    assert str(Counts(**numbers)) == text == "1 of 1 points held: kill 1"
    outcome.parts.clear()
    Sweeps(BUDGET).pytest_ranks_reported(outcome, reports)
    running.progress.plan = None
    outcome.parts[FEATURE] = running.progress
    Sweeps(BUDGET).pytest_ranks_reported(outcome, reports)
    assert len(reports[1].user_properties) == 2


def test_a_recording_makes_the_plan_or_says_why_not() -> None:
    spots = (Spot(0, "write", 1, 0, ""), Spot(0, "end", 1, 1, ""))
    recorded = Recorded(spots, frozenset(), {}, ("kill",), 0.1, 0.1, True, (0, 1))
    progress, run = Progress(BUDGET, None), Running().run
    made = progress.meet(run, {0: recorded})
    assert progress.plan is made
    assert isinstance(made, Plan)
    refused = progress.meet(run, {0: replace(recorded, reads=False)})
    assert refused == "the claim has not looked at anything below the directories"
    assert progress.plan is None


def test_a_part_that_ranks_say_before_the_sweep_has_begun_makes_its_progress() -> None:
    sweeps, run = Sweeps(BUDGET), SimpleNamespace(parts={}, order=SimpleNamespace(parts={}))
    parts: dict[str, Any] = {}
    votes = [Vote("", "x", more=Joins((folder,), 1)) for folder in ("a", "b")]
    sweeps.pytest_ranks_agreed(run, votes, parts)  # type: ignore[arg-type]
    progress: Any = run.parts[FEATURE]
    assert (progress.folders, parts) == ((("a",), ("b",)), {FEATURE: None})
    sweeps.pytest_ranks_agreed(run, votes, parts)  # type: ignore[arg-type]
    assert run.parts[FEATURE] is progress
    resume = Resume(Running().progress.plan, (), 4, None)  # type: ignore[arg-type]
    again = SimpleNamespace(parts={}, order=SimpleNamespace(parts={FEATURE: resume}))
    sweeps.pytest_ranks_agreed(again, votes, parts)  # type: ignore[arg-type]
    continued: Any = again.parts[FEATURE]
    assert continued.plan is resume.plan
    held = Result(Running().point, "", True)
    assert Progress(BUDGET, replace(resume, results=(held,))).results == [held]


def test_the_last_report_has_the_counts_of_a_sweep() -> None:
    running = Running()
    running.meet(*[Ran(True)] * 3)
    sweeps, _ = sweeps_of(running)
    outcome = ItemOutcome((), 1.0, False, 1.0, parts={FEATURE: running.progress})
    reports: Any = [SimpleNamespace(user_properties=[]), SimpleNamespace(user_properties=[])]
    sweeps.pytest_ranks_reported(outcome, reports)
    assert reports[1].user_properties == []
    running.meet(*[Claimed(True)] * 3)
    sweeps.pytest_ranks_reported(outcome, [])
    sweeps.pytest_ranks_reported(outcome, reports)
    assert [each.user_properties for each in reports] == [[], [("sweep", "1 of 1 points held: kill 1")]]
    ((title, picture),) = outcome.parts["timeline pictures"]
    assert title == "Points of the sweep: 1 of 1 points held: kill 1"
    assert "<svg" in picture


def test_sweeps_without_parts_are_summed_up_as_they_are() -> None:
    of = [("teardown", "a", [("sweep", "all")]), ("call", "a", [("sweep", "x")]), ("teardown", "b", [])]
    reports = [SimpleNamespace(when=when, nodeid=name, user_properties=more) for when, name, more in of]
    assert lines([SimpleNamespace(), *reports]) == ["sweep a: all"]
