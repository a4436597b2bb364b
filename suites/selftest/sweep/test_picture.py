"""The picture of a sweep: a lane a rank, in it a row a kind, a dot a point."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from lockstep.features.sweep.messages import Plan, Result
from lockstep.features.sweep.picture import draw
from lockstep.features.sweep.points import Point, Spot

SPOTS = tuple(Spot(rank, "write", number, number - 1, "") for rank in (0, 1) for number in (1, 2))
POINTS = tuple(
    Point(kind, rank, "write", number) for kind in ("kill", "fail") for rank, number in [(0, 1), (1, 2)]
)


def test_dots_lie_on_the_rows_of_their_kinds_below_their_ranks() -> None:
    plan = Plan(POINTS, SPOTS, len(POINTS), 1.0, 0.0, (), 10.0)
    svg = ElementTree.fromstring(draw([Result(point, "", True) for point in POINTS], plan))
    texts = [(each.text or "", int(each.get("y", "0"))) for each in svg.iter("text")]
    assert [text for text, _ in texts] == ["rank 0", "kill", "fail", "rank 1", "kill", "fail"]
    heights = [y for _, y in texts]
    assert heights == sorted(set(heights))
    rows = sorted({int(each.get("y1", "0")) for each in svg.iter("line")})
    dots = [(int(each.get("cx", "0")), int(each.get("cy", "0"))) for each in svg.iter("circle")]
    assert [y for _, y in dots] == [rows[0], rows[2], rows[1], rows[3]]
    assert [x for x, _ in dots] == [dots[0][0], dots[1][0]] * 2
    assert dots[0][0] < dots[1][0] < int(svg.get("width", "0"))
    assert max(rows) < int(svg.get("height", "0"))
    names = [re.sub(":.*", "", each.findtext("title") or "") for each in svg.iter("circle")]
    assert len(set(names)) == 4
