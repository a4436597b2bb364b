"""A timeline in at most twelve lines of text: the last collectives of each rank. Runs in the controller."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lockstep.features.timeline.timeline import Bar, Key, Lane, Timeline
from lockstep.world.diagnosis import named

MOST_LINES = 12
MOST_COLUMNS = 4
WIDTH = 110
"""Characters of a line that collectives may take, without the place."""
_NEVER_CAME = "─ never came ─"


def as_text(timeline: Timeline) -> str:
    """Return a line for each rank, or for several that did the same, and what letters mean."""
    keys = _columns(timeline)
    rows: dict[tuple[str, ...], list[Lane]] = {}
    for lane in timeline.lanes:
        did = [_cell(timeline, lane, key).rstrip("█") for key in keys]
        rows.setdefault((*did, _place(lane, keys)), []).append(lane)
    # Of ranks that did the same, the longest bar.
    cells = [
        [max((_cell(timeline, lane, key) for lane in lanes), key=len) for key in keys]
        for lanes in rows.values()
    ]
    names = [named(lane.rank for lane in lanes) for lanes in rows.values()]
    left = max(map(len, names))
    widths = [max(len(row[i]) for row in cells) for i in range(len(keys))]
    lines = []
    for name, row, (*_, place) in zip(names, cells, rows, strict=True):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{name.ljust(left)}  {shown}  {place}".rstrip())
    notes = _notes(timeline, keys)
    room = MOST_LINES - len(notes)
    if len(lines) > room:
        order = sorted(range(len(lines)), key=lambda i: not _stands_out(list(rows.values())[i]))
        kept = sorted(order[: room - 1])
        lines = [lines[i] for i in kept] + [f"... and {len(rows) - len(kept)} more"]
    return "\n".join([*lines, *notes])


def _columns(timeline: Timeline) -> list[Key]:
    """Return the collectives to show: the last ones, and of each rank that waits the one it waits in."""
    joins = timeline.joins
    waited = [_waits_in(bar for bar in lane.bars if bar.key in joins) for lane in timeline.lanes]
    wanted = list(dict.fromkeys(bar.key for bar in waited if bar is not None))[:2]
    for key in reversed(joins):
        members = timeline.members(*key[:2])
        if len(members) == 1 or (timeline.at_fault and timeline.at_fault.isdisjoint(members)):
            continue
        width = sum(len(_label(timeline, next(iter(joins[each].values())))) + 10 for each in (*wanted, key))
        if len(wanted) >= MOST_COLUMNS or (wanted and width > WIDTH):
            break
        if key not in wanted:
            wanted.append(key)
    return [key for key in joins if key in wanted]


def _label(timeline: Timeline, bar: Bar) -> str:
    letter = timeline.letters().get(bar.key[0], "")
    return bar.name + (f" ({letter})" if letter else "")


def _cell(timeline: Timeline, lane: Lane, key: Key) -> str:
    bar = timeline.joins[key].get(lane.rank)
    if bar is None:
        return _NEVER_CAME if key in lane.missing else ""
    label = _label(timeline, bar)
    if bar.state == "inferred":
        return f"{label} ░░"
    blocks = "█" * (7 if bar.is_in_vain else _length(bar))
    mark = {"waits": " waits", "failed": " failed"}.get(bar.state, "")
    return f"{label} {blocks}{mark}" + (" ≠" if bar.is_mismatch else "")


def _length(bar: Bar) -> int:
    """Return 1 up to 100 µs, and 1 more for each tenfold."""
    micros = (bar.end - bar.begun) / 1000
    return 1 if micros < 100 else min(6, int(math.log10(micros)))


def _place(lane: Lane, keys: list[Key]) -> str:
    """Return the line of the collective that a rank waits in, else its last line."""
    shown = [bar for bar in lane.bars if bar.key in keys and bar.line]
    waits = _waits_in(shown)
    if lane.died_at is not None:
        return f"✗ {lane.fate}{', ' if lane.place else ''}{lane.place}"
    if waits is not None:
        return waits.line + (f" ({waits.phase})" if waits.phase else "")
    return lane.place or lane.fate


def _waits_in(bars: Iterable[Bar]) -> Bar | None:
    """Return the first that a rank waits in, in its latest world, else the first that it has lost there."""
    in_vain = [bar for bar in bars if bar.is_in_vain or bar.is_mismatch]
    return min(in_vain, key=lambda bar: (bar.worlds_ago, bar.state != "waits"), default=None)


def _stands_out(lanes: list[Lane]) -> bool:
    return any(lane.is_blamed or lane.missing for lane in lanes)


def _notes(timeline: Timeline, keys: list[Key]) -> list[str]:
    notes = []
    letters = timeline.letters()
    for group in dict.fromkeys(key[0] for key in keys if key[0] in letters):
        members = named(timeline.members(group))
        notes.append(f"{letters[group]}: {members} (torch's group {group.split()[0]})")
    if any(not lane.is_known for lane in timeline.lanes):
        unknown = named(lane.rank for lane in timeline.lanes if not lane.is_known)
        notes.append(f"░: {unknown} left no record; the records of others show it")
    return notes[:4]
