"""The picture of a sweep for the page of a timeline: ranks are lanes, points are dots. In the controller."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.points import KINDS
from lockstep.features.sweep.report import count, describe

STEP, ROW, NAME, GAP = 22, 16, 18, 12
"""Pixels: from moment to moment, from kind to kind, the name of a lane, what is below a lane."""
LEFT = 80


def draw(results: Sequence[Result], plan: Plan) -> str:
    """Return the `svg` element: a lane a rank, in it a row a kind, and from left to right the moments."""
    kinds = [kind for kind in KINDS if any(result.point.kind == kind for result in results)]
    ranks = sorted({spot.rank for spot in plan.spots})
    height = NAME + ROW * len(kinds) + GAP
    tops = {rank: height * index for index, rank in enumerate(ranks)}
    width = LEFT + STEP * (max(spot.place for spot in plan.spots) + 1)
    parts = []
    for rank in ranks:
        parts.append(f'<text x="0" y="{tops[rank] + NAME - 4}" font-weight="bold">rank {rank}</text>')
        for row, kind in enumerate(kinds):
            y = tops[rank] + NAME + row * ROW + ROW // 2
            parts.append(f'<text x="0" y="{y + 4}">{kind}</text>')
            parts.append(f'<line class="compute" x1="{LEFT}" x2="{width}" y1="{y}" y2="{y}"/>')
    places = {(spot.rank, spot.op, spot.number): spot.place for spot in plan.spots}
    for result in results:
        point = result.point
        x = LEFT + STEP * places[point.rank, point.op, point.number] + STEP // 2
        y = tops[point.rank] + NAME + kinds.index(point.kind) * ROW + ROW // 2
        parts.append(_dot(result, plan, x, y))
    label = escape(f"Sweep: {count(results, plan)}")
    return (
        f'<svg role="group" aria-label="{label}" width="{width}" height="{height * len(ranks)}">'
        f"{''.join(parts)}</svg>"
    )


def _dot(result: Result, plan: Plan, x: int, y: int) -> str:
    if result.problem:
        kind, style, size = "fails", "fill:var(--fault)", 6
    elif result.has_struck:
        kind, style, size = "holds", "fill:#2f9e44", 5
    else:
        kind, style, size = "missed", "fill:none;stroke:var(--dim)", 4
    verdict = result.problem or ("holds" if result.has_struck else "made no difference")
    title = f"{describe(result.point, plan)}: {verdict}"
    return (
        f'<circle class="point {kind}" cx="{x}" cy="{y}" r="{size}" style="{style}">'
        f"<title>{escape(title)}</title></circle>"
    )
