"""The words of a sweep: what does not hold, the smallest first, and how many points of which kind held.

Used on both sides; must not import torch.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.points import KINDS, WHAT, Point

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
    where = f"at {text}" if point.op == "end" else f"before {point.op} {point.number}: {text}"
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
    return "\n".join([*rows, summary(results, plan)])


def summary(results: Sequence[Result], plan: Plan) -> str:
    """Say how many points of which kind held, which have not run, and which files nothing could disturb."""
    held = [result for result in results if not result.problem]
    counts = Counter(result.point.kind for result in held if result.has_struck)
    missed = sum(not result.has_struck for result in held)
    words = [f"{kind} {counts[kind]}" for kind in KINDS if counts[kind]]
    text = ": ".join([f"{len(held)} of {len(results)} points held", *([", ".join(words)] if words else [])])
    if missed:
        text += f"; {missed} made no difference"
    left = plan.num_all - len(results)
    if left:
        text += f"; {left} of {plan.num_all} did not run (--sweep-points all)"
    if plan.unseen:
        text += f"; written by code that is not seen: {', '.join(plan.unseen)}"
    return text


def refusal(results: Sequence[Result], plan: Plan) -> str:
    """Say why a sweep without a problem proves nothing, "" if it proves something."""
    if not results:
        return "no point has run: there was no time; give it more by --sweep-seconds"
    if not any(result.has_struck for result in results):
        return f"no point has struck: {describe(results[0].point, plan)}, for example, was not met again"
    if not any(result.reads for result in results):
        return "the claim has never looked at anything below the directories"
    return ""
