"""A timeline as SVG with widths in per cent: it fits any page without a script. In the controller."""

from __future__ import annotations

import itertools
from html import escape

from lockstep.features.timeline.scale import Scale
from lockstep.features.timeline.timeline import Bar, Key, Lane, Span, Timeline
from lockstep.flight_entries import DEFAULT_GROUP

NAME, PHASES, BAR, GAP = 18, 14, 24, 16
"""Pixels, from the top of a lane: its name, its phases, a row of bars; and what is below."""
CHARACTER = 9
"""Units of a character of a label: the picture may be compressed to 0.7 pixels a unit."""
TEST_PHASES = ("setup", "call", "teardown")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")


def identify(rank: int, bar: Bar) -> str:
    """Return the id of a bar's row in the table of calls."""
    return f"r{rank}-{bar.begun}"


def kind_of(bar: Bar) -> str:
    """Return which of KINDS a call is, "other" if it is none: `_all_gather_base` is an `all_gather`."""
    return next((kind for kind in KINDS if kind in bar.op), "other")


def draw(timeline: Timeline) -> str:
    """Return the `svg` element of a timeline."""
    return _Drawing(timeline).svg()


class _Drawing:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._scale = Scale(timeline)
        self._letters = timeline.letters()
        self._rows = {lane.rank: _rows(lane, self._scale) for lane in timeline.lanes}
        self._row_of = {
            (rank, bar.key, bar.begun): number
            for rank, rows in self._rows.items()
            for number, row in enumerate(rows)
            for bar in row
        }
        self._lanes = {lane.rank: lane for lane in timeline.lanes}
        self._tops: dict[int, int] = {}
        top = 4
        for lane in timeline.lanes:
            self._tops[lane.rank] = top
            top += NAME + PHASES + BAR * (max(1, len(self._rows[lane.rank])) + bool(self._absent(lane))) + GAP
        self._height = top

    def svg(self) -> str:
        lanes = "".join(self._lane(lane) for lane in self._timeline.lanes)
        joins = "".join(self._join(key) for key in self._timeline.joins)
        names = "".join(self._name(lane) for lane in self._timeline.lanes)
        label = f"Timeline of {self._timeline.nodeid}: {len(self._timeline.lanes)} ranks"
        return (
            f'<div class="names">{names}</div>'
            f'<svg role="group" aria-label="{escape(label)}" width="100%" height="{self._height}" '
            f'style="min-width:{min(self._scale.width * 0.7, 6000):.0f}px">{joins}{lanes}</svg>'
        )

    def _lane(self, lane: Lane) -> str:
        top = self._tops[lane.rank]
        rows = self._rows[lane.rank]
        bars_top = top + NAME + PHASES
        middle = bars_top + BAR // 2
        end = self._scale.left(lane.died_at) if lane.died_at is not None else 100.0
        parts = [
            '<g class="lane">',
            f'<line class="compute" x1="0" x2="{end:.2f}%" y1="{middle}" y2="{middle}"/>',
        ]
        # Those of the test's phases are thin, and below the labels of others.
        spans = sorted(lane.spans, key=lambda span: span.name not in TEST_PHASES)
        parts += [self._span(span, top + NAME) for span in spans]
        parts += [self._missing(lane, bars_top + BAR * len(rows))] if self._absent(lane) else []
        for number, row in enumerate(rows):
            parts += [self._bar(lane, bar, bars_top + number * BAR) for bar in row]
        if lane.died_at is not None:
            x = min(end, 99.0)
            parts.append(
                f'<svg x="{x:.2f}%" y="{bars_top}" width="1" height="{BAR}" overflow="visible">'
                f'<path class="death" d="M-8 4L8 20M8 4L-8 20"/><title>rank {lane.rank} {escape(lane.fate)}'
                "</title></svg>"
            )
        return "".join(parts) + "</g>"

    def _span(self, span: Span, y: int) -> str:
        left, right = self._scale.left(span.begun), self._scale.right(span.end)
        if span.end <= self._timeline.begun or right - left < 0.05:
            return ""
        known = "" if span.is_measured else ", from its first to its last collective"
        kind = span.name if span.name in ("forward", "backward", "optimizer", "fixture") else "phase"
        height, top = (4, y + 8) if span.name in TEST_PHASES else (10, y + 1)
        text = "" if height == 4 else f'<text x="3" y="8">{escape(span.name)}</text>'
        return (
            f'<svg x="{left:.2f}%" y="{top}" width="{right - left:.2f}%" height="{height}">'
            f'<rect class="span {kind}" width="100%" height="100%"/>{text}'
            f"<title>{escape(span.name)}{known}</title></svg>"
        )

    def _name(self, lane: Lane) -> str:
        """Return the name of a lane, which stays in sight where the picture is scrolled."""
        blamed = ' class="blamed"' if lane.rank in self._timeline.at_fault else ""
        state = f"{lane.fate}{': ' if lane.place else ''}{lane.place}"
        style = f'style="top:{self._tops[lane.rank]}px"'
        return f"<span{blamed} {style}><b>rank {lane.rank}</b> {escape(state)}</span>"

    def _absent(self, lane: Lane) -> list[Key]:
        return [key for key in lane.missing if key in self._timeline.joins]

    def _missing(self, lane: Lane, y: int) -> str:
        keys = self._absent(lane)
        left = self._left_of_missing(lane, keys[0])
        name = ", ".join(self._label(next(iter(self._timeline.joins[each].values()))) for each in keys)
        turn = "" if lane.rank in self._timeline.at_fault else " turn"
        text = self._text(f"never came: {name}", left, 100.0, f"never{turn}")
        return (
            f'<svg x="{left:.2f}%" y="{y}" width="{max(100 - left, 3):.2f}%" height="{BAR - 2}">'
            f'<rect class="missing{turn}" x="1" y="1" width="calc(100% - 2px)" height="20" rx="3"/>'
            f"{text}</svg>"
        )

    def _text(self, text: str, left: float, right: float, kind: str = "") -> str:
        """Return the label of a box, at both ends of one that may be wider than the window."""
        kind = f' class="{kind}"' if kind else ""
        parts = [f'<text{kind} x="5" y="15">{escape(text)}</text>']
        if self._scale.units(left, right) > 900:
            parts.append(f'<text{kind} x="100%" dx="-6" y="15" text-anchor="end">{escape(text)}</text>')
        return "".join(parts)

    def _left_of_missing(self, lane: Lane, key: Key) -> float:
        """Return where others began what this rank did not, or where its own last call before that ended."""
        begun = min(bar.begun for bar in self._timeline.joins[key].values())
        last = max((bar.end for bar in lane.bars if bar.state in ("over", "inferred")), default=0)
        return max(self._scale.left(begun), self._scale.right(last) if last else 0.0)

    def _label(self, bar: Bar) -> str:
        letter = self._letters.get(bar.key[0], "")
        return bar.name + (f" {letter}" if letter else "")

    def _bar(self, lane: Lane, bar: Bar, y: int) -> str:
        left, right = self._scale.left(bar.begun), self._scale.right(bar.end)
        right = max(right, left + 100 * 8 / self._scale.width)
        kind = kind_of(bar)
        marks = "".join(f" {mark}" for mark in (bar.state, "mismatch" if bar.is_mismatch else "") if mark)
        is_fault = bar.is_mismatch or lane.rank in self._timeline.at_fault
        marks += " turn" if bar.is_in_vain and not is_fault else ""
        open_end = " open" if not bar.has_end and bar.state in ("over", "inferred") else ""
        word = {"waits": " waits", "failed": " failed"}.get(bar.state, "") + (" ≠" if bar.is_mismatch else "")
        label = self._fitting(self._label(bar) + word, bar, self._scale.units(left, right))
        return (
            f'<a href="#{identify(lane.rank, bar)}" data-rank="{lane.rank}" '
            f'data-key="{escape("/".join(map(str, bar.key)))}">'
            f'<svg x="{left:.2f}%" y="{y}" width="{right - left:.2f}%" height="{BAR - 2}">'
            f'<rect class="bar {kind}{marks}{open_end}" x="1" y="1" '
            'width="calc(100% - 2px)" height="20" rx="3"/>'
            f"{self._text(label, left, right)}"
            f"<title>{escape(describe(lane.rank, bar, self._timeline))}</title></svg></a>"
        )

    def _fitting(self, label: str, bar: Bar, units: float) -> str:
        """Return what fits of a label: all, or without the operation (the colour shows it), or the number."""
        short = label.removeprefix(bar.op).strip()
        for each in (label, short, short.partition(" ")[0]):
            if CHARACTER * len(each) + 5 <= units:
                return each
        return ""

    def _join(self, key: Key) -> str:
        bars = self._timeline.joins[key]
        members = [rank for rank in self._timeline.members(*key[:2]) if rank in self._tops]
        lines = []
        places = [place for rank in members if (place := self._place(rank, key))[1]]
        for (x1, y1), (x2, y2) in itertools.pairwise(places):
            lines.append(f'<line x1="{x1:.2f}%" y1="{y1 + BAR - 2}" x2="{x2:.2f}%" y2="{y2}"/>')
        lanes = [lane for lane in self._timeline.lanes if lane.rank in members]
        if any(bar.is_mismatch for bar in bars.values()) or any(
            key in lane.missing and lane.rank in self._timeline.at_fault for lane in lanes
        ):
            kind = " fault"
        else:
            kind = " turn" if any(bar.is_in_vain for bar in bars.values()) else ""
        return f'<g class="join{kind}" data-key="{escape("/".join(map(str, key)))}">{"".join(lines)}</g>'

    def _place(self, rank: int, key: Key) -> tuple[float, int]:
        """Return where a join meets a lane: at the bar's beginning, or where the missing end should be."""
        bar = self._timeline.joins[key].get(rank)
        lane = self._lanes[rank]
        top = self._tops[rank] + NAME + PHASES
        if bar is not None:
            return self._scale.left(bar.begun), top + self._row_of[rank, key, bar.begun] * BAR
        if key in lane.missing:
            return self._left_of_missing(lane, key), top + BAR * len(self._rows[rank])
        return 0.0, 0


def describe(rank: int, bar: Bar, timeline: Timeline) -> str:
    """Return all that is known of a bar, a line each."""
    group = "the default group" if bar.key[0] == DEFAULT_GROUP else f"group {bar.key[0]}"
    members = ", ".join(map(str, timeline.members(*bar.key[:2])))
    lines = [f"rank {rank}: {bar.name} of {group} (ranks {members})"]
    size = "" if bar.num_bytes is None else f", {bar.num_bytes:,} bytes"
    lines.append((bar.tensors or "no tensor") + size)
    lines.append(times(bar, timeline))
    lines += [f"{'at' if i == 0 else 'from'} {line}" for i, line in enumerate(bar.lines[:4])]
    lines += [f"in {bar.phase}"] if bar.phase else []
    return "\n".join(lines)


def times(bar: Bar, timeline: Timeline) -> str:
    """Say when a call began, counted from the beginning of the picture, and how long it took."""
    begun, took = (bar.begun - timeline.begun) / 1e6, (bar.end - bar.begun) / 1e6
    match bar.state:
        case "inferred":
            return f"by {begun:.3f} ms: its own record is lost, the other ranks show it"
        case "waits":
            return f"begun at {begun:.3f} ms, in flight since {took:.3f} ms"
        case "failed":
            return f"begun at {begun:.3f} ms, failed"
        case _:
            least = "" if bar.has_end else "at least "
            return f"begun at {begun:.3f} ms, took {least}{took:.3f} ms"


def _rows(lane: Lane, scale: Scale) -> list[list[Bar]]:
    """Put bars that overlap into rows below each other."""
    rows: list[list[Bar]] = []
    ends: list[float] = []
    for bar in sorted(lane.bars, key=lambda each: each.begun):
        left, right = scale.left(bar.begun), scale.right(bar.end)
        free = next((i for i, end in enumerate(ends) if end <= left + 0.01), None)
        if free is None:
            rows.append([])
            ends.append(0.0)
            free = len(rows) - 1
        rows[free].append(bar)
        ends[free] = right
    return rows
