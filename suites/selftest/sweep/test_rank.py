"""A sweep on one rank, whose meetings with the others a test answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.features.sweep import rank as ranks
from lockstep.features.sweep.messages import (
    FEATURE,
    Begins,
    Claimed,
    Joins,
    Left,
    Over,
    Pending,
    Plan,
    Ran,
    Recorded,
    Result,
    Resume,
)
from lockstep.features.sweep.points import Point, Spot
from lockstep.features.sweep.rank import Crash, Functions, RankSweep, SweepFailed
from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_CASE, Agreed, Part, Vote

POINTS = (Point("kill", 1, "write", 1), Point("fail", 0, "write", 1))
SPOTS = (Spot(0, "write", 1, 0, "write of a"), Spot(1, "write", 1, 0, "write of b"))
PLAN = Plan(POINTS, SPOTS, 2, 12.0, 0.5, (), float("inf"))


class Ranks:
    """Rank 0 of two; the other one says the same, except where a test has it say something else."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Any] = []
        self.votes: list[Vote] = []
        self.other: dict[type, Any] = {}
        self.answers: dict[type, Any] = {Recorded: PLAN, Begins: True, Claimed: self._claimed}
        self.spec = SimpleNamespace(rank=0, directory=str(folder))
        self.group = SimpleNamespace(is_aborted=False)
        self.wire = SimpleNamespace(post=self.said.append)

    def _claimed(self, claimed: Claimed) -> Result:
        return Result(POINTS[0], claimed.error and f"failed: {claimed.error}", True, claimed.reads)

    def meet(self, vote: Vote) -> Agreed:
        self.votes.append(vote)
        self.said.append(vote.outcome)
        mine = vote.more
        other = self.other.get(type(mine), vote)
        answer = self.answers.get(type(mine))
        votes = (vote, other if isinstance(other, Vote) else Vote(vote.case, vote.outcome, more=other))
        return Agreed(votes, {FEATURE: answer(mine) if callable(answer) else answer})

    def begin_case(self, case: str) -> None:
        self.said.append(f"begin {case}")

    def end_case(self) -> None:
        self.said.append("end")

    def abort(self) -> None:
        self.said.append("abort")

    def repair(self) -> None:
        self.said.append("repair")


class Sweep:
    """A sweep of functions that a test may replace."""

    def __init__(self, folder: Path, resume: Resume | None = None) -> None:
        self.ranks = Ranks(folder)
        self.folder = folder / "state"
        self.cleared: list[None] = []
        order = SimpleNamespace(
            shared_tmp_path=str(folder / "deep" / "shared"), parts={FEATURE: resume} if resume else {}
        )
        self.session: Any = SimpleNamespace(rank=self.ranks, order=order)
        self.crashes: list[Crash] = []
        self.functions = Functions(self.save, self.then, self.prepare)
        self.made: Any = RankSweep(
            self.session,
            self.functions,
            (str(self.folder),),
            SimpleNamespace(clear=lambda: self.cleared.append(None)),  # type: ignore[arg-type]
        )
        self.ranks.said.clear()

    def save(self) -> None:
        self.ranks.said.append("save")
        (self.folder / "a").write_text("a")

    def then(self, crash: Crash) -> None:
        self.crashes.append(crash)
        self.ranks.said.append("then")
        (self.folder / "a").exists()

    def prepare(self) -> None:
        self.ranks.said.append(f"prepare {[each.name for each in self.folder.iterdir()]}")

    def run(self, part: tuple[int, int] = (0, 1)) -> None:
        try:
            self.made.run(("kill", "fail"), part)
        except pytest.skip.Exception as skipped:  # it would skip the self-test
            raise RuntimeError(skipped.msg) from None


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def patient(rank: object, lost_peers: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(ranks, "patient_waits", patient)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def test_a_sweep_runs_the_function_and_then_each_point(sweep: Sweep, tmp_path: Path) -> None:
    sweep.run((1, 2))
    kill, fail = map(str, POINTS)
    undisturbed = "the undisturbed run of a sweep"
    assert sweep.ranks.said == [
        *("has put files back", f"begin {undisturbed}", "prepare []", "begins", "save", "has run"),
        *("then", "has claimed"),
        *("has put files back", f"begin {kill}", "prepare []", "begins", "save", "ran"),
        *(f"begin the claim after {kill}", "then", "claimed"),
        *(
            "has put files back",
            f"begin {fail}",
            "prepare []",
            "begins",
            "save",
            "abort",
            Part(FEATURE, Left()),
            "ran",
        ),
        *("repair", f"begin the claim after {fail}", "then", "claimed"),
        *("over", "end"),
    ]
    assert len(sweep.cleared) == 3
    assert [vote.case for vote in sweep.ranks.votes] == [
        "the beginning of a sweep",
        *[undisturbed] * 4,
        *[kill] * 3,
        f"the claim after {kill}",
        *[fail] * 3,
        f"the claim after {fail}",
        "the end of a sweep",
    ]
    assert all(vote.renews_deadline for vote in sweep.ranks.votes)
    more = [vote.more for vote in sweep.ranks.votes if vote.more is not None]
    joins, recorded, begins, ran, claimed, *others = more
    assert joins == Joins((str(sweep.folder),), os.getpid())
    assert (recorded.kinds, recorded.part, recorded.reads) == (("kill", "fail"), (1, 2), True)
    assert [spot.op for spot in recorded.spots] == ["open", "write", "end"]
    assert recorded.touched == {str(sweep.folder / "a")}
    assert {*recorded.appeared.values()} == {recorded.touched}
    assert 0.0 <= recorded.claim_seconds < 60.0
    assert -1.0 < recorded.seconds < 60.0
    assert (begins, ran, claimed) == (Begins(0), Ran(False), Claimed(True))
    error = f"OSError: [Errno 5] Input/output error (injected): '{sweep.folder}/a' at "
    assert others[0] == Begins(1)
    assert others[1].has_struck
    assert others[1].error.startswith(error[:40])
    assert others[-1] == Over()
    first, second, third = sweep.crashes
    assert first == Crash()
    assert (first.kind, first.rank, first.point) == (None, None, "the undisturbed run")
    assert second == Crash("kill", 1, kill, {})
    assert (third.kind, third.rank, third.point) == ("fail", 0, fail)
    assert third.errors == {0: others[1].error, 1: others[1].error}
    assert sweep.made._striker.lag == 0.5
    assert sweep.made._striker.processes == (os.getpid(),) * 2
    assert (tmp_path / "deep" / "shared.sweep").is_dir()


def test_a_sweep_that_proves_nothing_is_refused(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "refusal", lambda results, plan: f"{len(results)} of {len(plan.points)}")
    with pytest.raises(SweepFailed, match=r"^sweep: 2 of 2$") as failed:
        sweep.run()
    assert (failed.value.point, failed.value.pytrace) == (None, False)
    assert sweep.ranks.said[-2:] == ["over", "end"]


def test_a_point_that_does_not_hold_fails_the_test(sweep: Sweep) -> None:
    def then(crash: Crash) -> None:
        if crash.kind == "fail":
            raise ValueError("it is torn\nmore")

    object.__setattr__(sweep.functions, "then", then)
    sweep.ranks.answers[Claimed] = lambda claimed: Result(POINTS[1], claimed.error, True)
    with pytest.raises(SweepFailed, match="1 of 2") as failed:
        sweep.run()
    assert failed.value.point == POINTS[1]
    assert sweep.ranks.said[-5:] == [Part(FEATURE, Left()), "claimed", "repair", "over", "end"]
    (claimed,) = [
        each.more for each in sweep.ranks.votes if isinstance(each.more, Claimed) and each.more.error
    ]
    assert re.fullmatch(r"ValueError: it is torn at .*test_rank\.py:\d+", claimed.error)
    assert (claimed.reads, claimed.is_lost, claimed.is_broken) == (False, False, False)


def test_a_claim_that_looks_at_nothing_is_noted(sweep: Sweep) -> None:
    def save() -> None:
        assert not (sweep.folder / "a").exists()
        (sweep.folder / "a").touch()

    object.__setattr__(sweep.functions, "save", save)
    object.__setattr__(sweep.functions, "then", lambda crash: None)
    with pytest.raises(SweepFailed):
        sweep.run()
    said = [vote.more for vote in sweep.ranks.votes]
    assert [each.reads for each in said if isinstance(each, Recorded | Claimed)] == [False] * 3


def test_a_plan_without_points_is_refused(sweep: Sweep) -> None:
    sweep.ranks.answers[Recorded] = "there is nothing to disturb"
    with pytest.raises(SweepFailed, match=r"^sweep: there is nothing to disturb$"):
        sweep.run()


def test_no_point_begins_when_the_time_is_over(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(ranks, "failing", lambda results, plan: found.append(results) or [])
    monkeypatch.setattr(ranks, "refusal", lambda results, plan: "")
    sweep.ranks.answers[Begins] = lambda begins: begins.index == 0
    sweep.run()
    assert [len(results) for results in found] == [1]
    assert sweep.ranks.said[-3:] == ["begins", "over", "end"]


def test_a_world_that_has_lost_a_rank_is_left(sweep: Sweep) -> None:
    sweep.ranks.other[Ran] = Vote("", "died")
    with pytest.raises(RuntimeError, match="the sweep continues on another world"):
        sweep.run()
    assert sweep.ranks.said[-2:] == ["ran", "abort"]


@pytest.mark.parametrize("other", [Ran(False, "lost", is_lost=True), Ran(False, is_broken=True)])
def test_connections_that_another_has_closed_are_repaired(sweep: Sweep, other: Ran) -> None:
    sweep.ranks.other[Ran] = other
    sweep.run()
    said = sweep.ranks.said
    assert said[said.index("ran") + 1] == "repair"
    assert sweep.crashes[1].errors == ({1: "lost"} if other.error else {})


def test_connections_that_a_claim_has_closed_are_repaired(sweep: Sweep) -> None:
    sweep.ranks.other[Claimed] = Claimed(False, is_broken=True)
    sweep.run()
    said = sweep.ranks.said
    assert said[said.index("claimed") + 1] == "repair"


def test_what_ends_the_run_is_no_error_of_the_function(sweep: Sweep) -> None:
    with pytest.raises(KeyboardInterrupt), sweep.made._catching(ranks._Error()):
        raise KeyboardInterrupt
    assert sweep.ranks.said == []
    error = ranks._Error()
    with sweep.made._catching(error):
        raise pytest.fail.Exception("x")
    assert error.text.startswith("Failed: x at ")
    assert not error.is_lost


def test_ranks_say_the_same_at_a_meeting(sweep: Sweep) -> None:
    sweep.made._case = "a point"
    sweep.ranks.other[Over] = Vote("x", "ended")
    with pytest.raises(PeerFailed, match=re.escape(f"{VICTIM_OF_A_CASE}rank 1 {HAS_ENDED}")):
        sweep.made._meet("over", Over())
    sweep.ranks.other[Over] = Vote("another test", "met", more=Begins(0))
    where = "rank 0 at a point, rank 1 at another test"
    why = f"sweep: all ranks have to call it, and nothing else in its place; {where}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(why)}$"):
        sweep.made._meet("over", Over())
    sweep.ranks.other[Over] = Vote("x", "died")
    assert len(sweep.made._meet("over", Over()).votes) == 2


@pytest.mark.parametrize("problem", ["", "a hang"])
def test_a_sweep_goes_on_in_another_world_with_the_claim(tmp_path: Path, problem: str) -> None:
    left = tmp_path / "left"
    left.mkdir()
    (left / "torn").touch()
    held = Result(POINTS[1], "", True, True)
    plan = Plan((POINTS[1], *POINTS), SPOTS, 3, 12.0, 0.25, (), float("inf"))
    pending = Pending(1, {1: "broke"}, {"0/0": str(left)}, problem)
    sweep = Sweep(tmp_path, Resume(plan, (held,), 3, pending))
    sweep.ranks.answers[Claimed] = Result(POINTS[0], "", True, True)
    sweep.run()
    name = str(POINTS[0])
    assert sweep.ranks.said == ["begins", f"begin the claim after {name}", "then", "claimed", "over", "end"]
    assert [vote.case for vote in sweep.ranks.votes[1:]] == [
        name,
        f"the claim after {name}",
        "the end of a sweep",
    ]
    assert sweep.ranks.votes[1].more == Begins(1, only_claims=True)
    assert sweep.crashes == [Crash("kill", 1, name, {1: "broke"})]
    assert [each.name for each in sweep.folder.iterdir()] == ["torn"]


def test_a_sweep_goes_on_in_another_world_without_a_claim(tmp_path: Path) -> None:
    held = Result(POINTS[0], "", True, True)
    (tmp_path / "deep" / "shared.sweep").mkdir(parents=True)
    sweep = Sweep(tmp_path, Resume(PLAN, (held,), 1, None))
    sweep.ranks.answers[Claimed] = Result(POINTS[1], "torn", True, True)
    with pytest.raises(SweepFailed):
        sweep.run()
    assert [vote.more for vote in sweep.ranks.votes if isinstance(vote.more, Begins)] == [Begins(1)]


def test_copies_of_the_directories_end_with_a_sweep(sweep: Sweep) -> None:
    kept = sweep.made._kept
    assert kept.is_dir()
    assert kept.name.startswith("sweep-")
    (kept / "x").touch()
    sweep.made.end()
    sweep.made.end()
    assert not kept.exists()


def test_an_error_is_described_in_a_line() -> None:
    assert ranks._describe(ValueError()) == "ValueError"
    assert ranks._describe(ValueError("a\nb")) == "ValueError: a"
    longest = "x" * ranks.MOST_CHARACTERS
    assert ranks._describe(ValueError(longest)) == f"ValueError: {longest}"
    assert ranks._describe(ValueError(f"{longest}y")) == f"ValueError: {longest}..."
    try:
        re.compile("(")
    except re.error as error:
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
        text = ranks._describe(error)
    assert text.endswith(f" at {os.path.relpath(__file__)}:{line}")
