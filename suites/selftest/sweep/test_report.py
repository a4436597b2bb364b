"""The words of a sweep: how many points held, and how many of them made a difference."""

from __future__ import annotations

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.points import Point
from lockstep.features.sweep.report import count

POINTS = tuple(Point("kill", 0, "write", number) for number in (1, 2, 3))


def test_points_that_held_and_did_not_strike_made_no_difference() -> None:
    plan = Plan(POINTS, (), 4, 1.0, 0.0, (), 10.0)
    results = [Result(POINTS[0], "", True), Result(POINTS[1], "", False), Result(POINTS[2], "lost", True)]
    counts = count(results, plan)
    assert (counts.held, counts.struck) == (2, {"kill": 1})
    assert str(counts) == (
        "2 of 3 points held: kill 1; 1 made no difference; 1 of 4 did not run (--sweep-points all)"
    )
