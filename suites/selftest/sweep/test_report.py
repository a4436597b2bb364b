"""The words of a sweep: how many points held, how many of them made a difference, and what does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.points import Kind, Point, Spot
from lockstep.features.sweep.report import MOST_ROWS, Counts, count, describe, headline, refusal, table

POINTS = tuple(Point("kill", 0, "write", number) for number in (1, 2, 3))
SPOTS = (
    *(
        Spot(rank, "write", number, number - 1, f"write of x-{number}")
        for rank in (0, 1)
        for number in (1, 2)
    ),
    Spot(0, "end", 1, 2, "the end"),
)
PLAN = Plan(POINTS, SPOTS, 4, 1.0, 0.0, (), 10.0)


def test_points_that_held_and_did_not_strike_made_no_difference() -> None:
    results = [Result(POINTS[0], "", True), Result(POINTS[1], "", False), Result(POINTS[2], "lost", True)]
    counts = count(results, PLAN)
    assert (counts.held, counts.struck) == (2, {"kill": 1})
    assert str(counts) == (
        "2 of 3 points held: kill 1; 1 made no difference; 1 of 4 did not run (--sweep-points all)"
    )


def test_what_did_not_happen_is_left_out_of_the_counts() -> None:
    assert str(Counts(2, 2, {"kill": 2}, 2, ())) == "2 of 2 points held: kill 2"
    assert str(Counts(1, 0, {}, 1, ())) == "0 of 1 points held"


@pytest.mark.parametrize(
    ("kind", "op", "words"),
    [
        ("kill", "write", "rank 0 is killed (SIGKILL) before write 2: write of x-2"),
        ("torn", "write", "rank 0 is killed (SIGKILL) half-way through write 2: write of x-2"),
        ("kill", "end", "rank 0 is killed (SIGKILL) at the end"),
    ],
)
def test_a_point_is_described_by_what_its_rank_does_there(kind: Kind, op: str, words: str) -> None:
    assert describe(Point(kind, 0, op, 2 if op == "write" else 1), PLAN) == words


def test_points_that_do_not_hold_are_listed_from_the_smallest() -> None:
    order: Sequence[tuple[Kind, int, int]] = [("kill", 0, 1), ("kill", 1, 1), ("torn", 0, 1), ("kill", 0, 2)]
    bad = [Result(Point(kind, rank, "write", number), f"{kind} {rank}", True) for kind, rank, number in order]
    held = Result(Point("delay", 0, "write", 1), "", True)
    words = headline([bad[2], held, bad[3], bad[1], bad[0]], PLAN).splitlines()
    assert words == [
        "4 of 5 points do not hold; the smallest: rank 0 is killed (SIGKILL) before write 1: write of x-1",
        "kill 0",
    ]
    assert headline([bad[1], held], PLAN).startswith("1 of 2 points does not hold; the smallest: rank 1 is")
    rows = table([bad[2], held, bad[3], bad[1], bad[0]], replace(PLAN, num_all=5), "again").splitlines()
    assert rows[2::3] == [
        f"    again --sweep-point '{kind} rank {rank} write {n}'" for kind, rank, n in order
    ]
    assert rows[1:-1:3] == ["    kill 0", "    kill 1", "    torn 0", "    kill 0"]
    assert rows[-1] == "1 of 5 points held: delay 1"


@pytest.mark.parametrize(("more", "said"), [(0, []), (1, ["and 1 points more"]), (5, ["and 5 points more"])])
def test_a_table_lists_twenty_points_and_counts_the_others(more: int, said: list[str]) -> None:
    lines = table([Result(POINTS[0], "lost", True)] * (20 + more), PLAN, "again").splitlines()
    assert MOST_ROWS == 20
    assert lines[20 * 3 : -1] == said


def test_a_sweep_needs_a_point_that_strikes_and_one_that_is_read() -> None:
    nothing, struck, read = (
        Result(POINTS[0], "", *each) for each in [(False, False), (True, False), (False, True)]
    )
    assert refusal([], PLAN) == "no point has run: there was no time; give it more by --sweep-seconds"
    assert refusal([nothing, read], PLAN) == (
        "no point has struck: rank 0 is killed (SIGKILL) before write 1: write of x-1, for example, "
        "was not met again"
    )
    assert refusal([struck, nothing], PLAN) == "the claim has never looked at anything below the directories"
    assert refusal([nothing, struck, read], PLAN) == ""


@pytest.mark.parametrize(("kind", "parts", "is_refused"), [("order", 1, 1), ("order", 2, 0), ("kill", 2, 1)])
def test_a_part_may_have_no_point_that_strikes(kind: Kind, parts: int, is_refused: bool) -> None:
    plan = replace(PLAN, points=(Point(kind, 0, "write", 1),), num_parts=parts)
    assert bool(refusal([Result(plan.points[0], "", False)], plan)) is bool(is_refused)
