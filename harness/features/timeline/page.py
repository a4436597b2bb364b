"""The page of a timeline, and the index of a run's pages: HTML that needs no network. In the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lockstep.features.timeline.svg import KINDS, draw, identify, kind_of, times
from lockstep.features.timeline.timeline import Timeline

MOST = 64
"""Collectives in a picture: the last ones; the file for Perfetto has all that are recorded."""
_COLOURS = {
    **dict(zip(KINDS, ("gather", "scatter", "reduce", "exchange", "broadcast", "barrier"), strict=True)),
    "other": "other",
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"COLOURS": _COLOURS, "identify": identify, "times": times}
    return environment


def page_of(timeline: Timeline, outcome: str, report: str, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page of a test.

    Args:
        outcome: "passed", say.
        report: text of its failure.
        pictures: titles and SVG of what other features draw.
    """
    shown = timeline.last(MOST)
    calls = [(lane.rank, bar) for lane in shown.lanes for bar in lane.bars]
    used = {kind_of(bar) for _, bar in calls}
    page = _environment().get_template("page.html.j2")
    return page.render(
        title=timeline.nodeid,
        timeline=shown,
        outcome=outcome,
        report=report,
        cause=timeline.sentence or report.partition("\n")[0],
        drawn=draw(shown),
        pictures=pictures,
        kinds=[kind for kind in _COLOURS if kind in used],
        calls=sorted(calls, key=lambda call: (call[1].begun, call[0])),
    )


def index_of(tests: Iterable[Mapping[str, Any]]) -> str:
    """Return the page that lists the pages of a run.

    Args:
        tests: `nodeid`, `page` (a path below the folder), `outcome`, `ranks`, `calls` and `ms` of each.
    """
    return _environment().get_template("index.html.j2").render(title="Timelines", tests=tests)
