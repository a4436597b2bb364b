"""The points of a sweep, its plan, and its progress in the controller; no ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.sweep.controller import Budget, Progress, lines, make_plan
from lockstep.features.sweep.messages import Begins, Plan, Recorded, Resume
from lockstep.features.sweep.parts import without_part
from lockstep.features.sweep.points import KINDS, Point, Spot, choose, describe_spots, points_of
from lockstep.features.sweep.report import Counts, refusal
from lockstep.world.clock import Clock

SPOTS = [Spot(rank, "write", number, number - 1, "") for rank in range(2) for number in range(1, 51)]


def test_points_are_spread_over_kinds_ranks_and_phases() -> None:
    points = points_of(SPOTS, ["kill", "fail", "full", "delay"])
    assert len(points) == 400
    chosen = choose(points, 40, seed=3)
    assert chosen == choose(points, 40, seed=3)
    assert chosen != choose(points, 40, seed=4)
    assert Counter((each.kind, each.rank) for each in chosen) == {
        (kind, rank): 5 for kind in ("kill", "fail", "full", "delay") for rank in range(2)
    }
    assert {(each.number - 1) // 10 for each in chosen if each.kind == "kill"} == set(range(5))
    assert len(choose(points, None, seed=3)) == 400
    parts = [choose(points, 100, seed=3)[part::3] for part in range(3)]
    assert len({str(each) for part in parts for each in part}) == 100


@pytest.mark.parametrize(
    ("op", "is_contended", "kinds"),
    [
        ("end", False, "kill all power delay"),
        ("fsync", False, "kill all power delay fail"),
        ("mkdir", False, "kill all power delay fail full"),
        ("write", False, "kill all power delay fail full torn"),
        ("collective", False, "kill all power delay fail invisible"),
        ("collective", True, "kill all power delay fail invisible order"),
    ],
)
def test_a_moment_has_the_faults_that_make_a_difference_there(
    op: str, is_contended: bool, kinds: str
) -> None:
    spot = Spot(1, op, 1, 0, "", is_contended)
    assert " ".join(spot.kinds()) == kinds
    assert [each.kind for each in points_of([spot], KINDS)] == [
        each for each in KINDS if each in kinds.split()
    ]


def test_as_many_points_as_there_are_run_in_a_drawn_order() -> None:
    points = points_of(SPOTS, ["kill"])
    assert choose([], 3, seed=1) == []
    assert choose([], None, seed=1) == []
    drawn = choose(points, 1000, seed=1)
    assert drawn != points
    assert sorted(drawn, key=points.index) == points


def test_moments_are_counted_by_rank_and_operation() -> None:
    spots = [*SPOTS[50:], Spot(0, "open", 1, 0, ""), *SPOTS[:2], Spot(0, "end", 1, 3, "")]
    assert describe_spots(spots) == "rank 0: open 1, write 1 to 2, end 1; rank 1: write 1 to 50"


def recorded(number: int = 0, parts: int = 1) -> Recorded:
    return Recorded(tuple(SPOTS[:50]), frozenset(), {}, ("kill",), 0.1, 0.1, True, (number, parts))


def test_no_point_begins_after_the_seconds_of_the_budget() -> None:
    for seconds, begins in ((60.0, True), (1e-9, False), (None, True)):
        plan = make_plan([recorded()], Budget(None, seconds, None, 0))
        assert isinstance(plan, Plan)
        progress = Progress(Budget(None, seconds, None, 0), Resume(plan, (), 0, None))
        run: Any = SimpleNamespace(outcomes=[], clock=Clock(60))
        assert progress.meet(run, {0: Begins(0)}) is begins


def test_a_point_that_is_not_there_is_refused() -> None:
    only = Point.parse("kill rank 0 write 99")
    said = "--sweep-point 'kill rank 0 write 99': there is no such point; there are rank 0: write 1 to 50"
    assert make_plan([recorded()], Budget(None, None, only, 0)) == said


def test_a_recording_that_has_nothing_to_disturb_is_refused() -> None:
    budget = Budget(None, None, None, 0)
    (end,) = empty = (Spot(0, "end", 1, 0, ""),)
    without = replace(recorded(), spots=empty)
    assert str(make_plan([without, without], budget)).startswith(
        "the function has no point: it has called no"
    )
    assert isinstance(make_plan([without, recorded()], budget), Plan)
    unread = replace(recorded(), reads=False)
    assert make_plan([unread, unread], budget) == "the claim has not looked at anything below the directories"
    assert isinstance(make_plan([unread, recorded()], budget), Plan)
    torn = replace(recorded(), spots=(Spot(0, "fsync", 1, 0, ""), end), kinds=("torn", "full"))
    assert make_plan([torn], budget) == "no fault of the kinds torn, full makes a difference at any point"


def test_a_point_is_refused_where_its_kind_makes_no_difference() -> None:
    only = Point.parse("order rank 0 write 3")
    assert "there is no such point" in str(make_plan([recorded()], Budget(None, None, only, 0)))
    only = Point.parse("full rank 0 write 3")
    plan = make_plan([recorded()], Budget(1, None, only, 0))
    assert isinstance(plan, Plan)
    assert (plan.points, plan.num_all) == ((only,), 1)


def test_a_plan_gives_ranks_ten_times_what_the_slowest_took() -> None:
    fast, slow = recorded(), replace(recorded(), seconds=2.0, claim_seconds=0.0)
    claims = replace(recorded(), claim_seconds=3.0)
    for each, within, lag in (([fast, slow], 28.0, 4.1), ([slow, claims], 38.0, 4.1), ([fast], 9.0, 0.3)):
        plan = make_plan(each, Budget(2, None, None, 0))
        assert isinstance(plan, Plan)
        assert (plan.within, plan.lag) == pytest.approx((within, lag))
        assert (len(plan.points), plan.num_all, len(plan.spots)) == (2, 50, 50 * len(each))
        assert (plan.until, plan.unseen) == (float("inf"), ())


def test_a_moment_names_the_files_that_no_rank_was_seen_to_write() -> None:
    one = replace(
        recorded(), touched=frozenset({"/d/seen"}), appeared={1: frozenset({"/d/seen", "/d/raw", "/d/by-2"})}
    )
    two = replace(recorded(), touched=frozenset({"/d/by-2"}), appeared={4: frozenset({"/d/a/z", "/d/raw"})})
    plan = make_plan([one, two], Budget(None, None, None, 0))
    assert isinstance(plan, Plan)
    assert plan.unseen == ("raw", "z")
    assert {place: spot.text for place, spot in enumerate(plan.spots) if spot.text} == {
        1: "; after a write by C++ of raw (seen by polling)",
        54: "; after a write by C++ of raw, z (seen by polling)",
    }


def test_a_part_without_points_proves_what_it_can() -> None:
    budget = Budget(2, None, None, 0)
    made = [make_plan([recorded(number, 3)], budget) for number in range(3)]
    plans = [plan for plan in made if isinstance(plan, Plan)]
    assert [len(plan.points) for plan in plans] == [1, 1, 0]
    assert [refusal([], plan)[:16] for plan in plans] == ["no point has run", "no point has run", ""]


def test_parts_of_a_sweep_are_reported_as_one() -> None:
    counts = [Counts(3, 2, {"kill": 1, "fail": 1}, 9, ("x",)), Counts(4, 4, {"kill": 2}, 9, ())]
    reports = [
        SimpleNamespace(
            nodeid=f"test_x.py::test_y[a-part-{number + 1}-of-2]",
            when="teardown",
            user_properties=[("sweep", str(each)), ("sweep counts", asdict(each))],
        )
        for number, each in enumerate(counts)
    ]
    assert lines(reports) == [
        "sweep test_x.py::test_y[a]: 6 of 7 points held: kill 3, fail 1; 2 made no difference; "
        "2 of 9 did not run (--sweep-points all); written by code that is not seen: x"
    ]


@pytest.mark.parametrize(
    ("ids", "whole"),
    [
        ("[part-1-of-2]", ""),
        ("[part-1-of-2-FULL-sync]", "[FULL-sync]"),
        ("[a-part-10-of-12]", "[a]"),
        ("[a-part-2-of-2-b]", "[a-b]"),
    ],
)
def test_a_part_leaves_the_id_of_the_whole_sweep(ids: str, whole: str) -> None:
    assert without_part(f"test_x.py::test_y{ids}") == f"test_x.py::test_y{whole}"


def test_the_name_of_a_point_is_read_back() -> None:
    for point in points_of(SPOTS, ["kill", "power"]):
        assert Point.parse(str(point)) == point
