"""The words of a sweep: what does not hold, the smallest first, and how many points of which kind held.

Used on both sides; must not import torch.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.points import KINDS, MAY_MISS, WHAT, Point

MOST_ROWS = 20
"""Points that a report lists."""


def failing(results: Sequence[Result], plan: Plan) -> list[Result]:
    """Return the results of points that do not hold, the smallest first: early, then a simple kind."""
    places = {(spot.rank, spot.op, spot.number): spot.place for spot in plan.spots}

    def size(result: Result) -> tuple[int, int, int]:
        point = result.point
        return places[point.rank, point.op, point.number], KINDS.index(point.kind), point.rank

    return sorted((result for result in results if result.problem), key=size)


def headline(results: Sequence[Result], plan: Plan) -> str:
    """Say how many points do not hold, and what was wrong at the smallest."""
    problems = failing(results, plan)
    first = problems[0]
    verb = "does" if len(problems) == 1 else "do"
    count = f"{len(problems)} of {len(results)} points {verb} not hold"
    return f"{count}; the smallest: {describe(first.point, plan)}\n{first.problem}"


def describe(point: Point, plan: Plan) -> str:
    """Return a point in words: "rank 1 is killed (SIGKILL) before write 2: write of part-1 at ..."."""
    text = next(spot.text for spot in plan.spots if point.is_at(spot))
    when = "through" if point.kind == "torn" else "before"
    where = f"at {text}" if point.op == "end" else f"{when} {point.op} {point.number}: {text}"
    return f"rank {point.rank} {WHAT[point.kind]} {where}"


def table(results: Sequence[Result], plan: Plan, rerun: str) -> str:
    """Return the points that do not hold, each with what was wrong and the line that runs it again.

    Args:
        rerun: the command that runs the test again.
    """
    problems = failing(results, plan)
    rows = []
    for each in problems[:MOST_ROWS]:
        again = f"{rerun} --sweep-point {shlex.quote(str(each.point))}"
        rows.append(f"{describe(each.point, plan)}\n    {each.problem}\n    {again}")
    more = len(problems) - MOST_ROWS
    rows += [f"and {more} points more"] * (more > 0)
    return "\n".join([*rows, str(count(results, plan))])


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of the points of a sweep, or of a part of it."""

    ran: int
    held: int
    struck: dict[str, int]
    """Number of points that held and struck, by kind."""
    num_all: int
    """Number of points that there are."""
    unseen: tuple[str, ...]
    """Names of files that were written by code that is not seen."""

    def __add__(self, other: Counts) -> Counts:
        """Return the numbers of two parts of one sweep together."""
        return Counts(
            self.ran + other.ran,
            self.held + other.held,
            dict(Counter(self.struck) + Counter(other.struck)),
            self.num_all,
            tuple(sorted({*self.unseen, *other.unseen})),
        )

    def __str__(self) -> str:
        """Return how many points of which kind held, how many have not run, and which files were not seen."""
        words = [f"{kind} {self.struck[kind]}" for kind in KINDS if kind in self.struck]
        text = ": ".join([f"{self.held} of {self.ran} points held", *([", ".join(words)] if words else [])])
        if missed := self.held - sum(self.struck.values()):
            text += f"; {missed} made no difference"
        if left := self.num_all - self.ran:
            text += f"; {left} of {self.num_all} did not run (--sweep-points all)"
        if self.unseen:
            text += f"; written by code that is not seen: {', '.join(self.unseen)}"
        return text


def count(results: Sequence[Result], plan: Plan) -> Counts:
    """Count the points that have run."""
    held = [result for result in results if not result.problem]
    struck: Counter[str] = Counter(result.point.kind for result in held if result.has_struck)
    return Counts(len(results), len(held), dict(struck), plan.num_all, plan.unseen)


def refusal(results: Sequence[Result], plan: Plan) -> str:
    """Say why a sweep without a problem proves nothing, "" if it proves something.

    A part of a sweep may have no point, or such alone as make no difference where others do.
    """
    is_part = plan.num_parts > 1
    if is_part and all(point.kind in MAY_MISS for point in plan.points):
        return ""
    if not results:
        return "no point has run: there was no time; give it more by --sweep-seconds"
    if not any(result.has_struck for result in results):
        return f"no point has struck: {describe(results[0].point, plan)}, for example, was not met again"
    if not any(result.reads for result in results):
        return "the claim has never looked at anything below the directories"
    return ""
