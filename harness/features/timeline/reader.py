"""Reads the timeline of a test from the flight records of its ranks.

Runs in the controller; must not import torch.

gloo records when a collective began and whether it is over, but not when it ended. It cannot have ended
before its last rank began it: that is where a bar ends then (`Bar.has_end` is False).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lockstep import flight_entries as entries
from lockstep.backends import BROKEN_CONNECTION
from lockstep.features.timeline import FEATURE
from lockstep.features.timeline.timeline import (
    WORLD,
    Bar,
    Key,
    Lane,
    Span,
    State,
    Timeline,
    members_of,
)
from lockstep.flight_entries import DEFAULT_GROUP, Entry, FlightRecord
from lockstep.tracebacks import user_line
from lockstep.world.diagnosis import place_of
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

_SIZES = {
    **dict.fromkeys(("complexdouble",), 16),
    **dict.fromkeys(("double", "long", "complexfloat", "float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32", "uint32", "complexhalf"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("char", "byte", "bool", "int8", "uint8"), 1),
}
"""Bytes of an element, by the name that torch's recorder gives the dtype, in lower case."""


def read_timeline(
    nodeid: str, outcome: ItemOutcome, base: str, until: int | None = None, sentence: str = ""
) -> Timeline | None:
    """Return the timeline of a test; None if no rank has called anything, or none is known.

    Args:
        base: directory that the user's files are named from.
        until: where it ends, of a subtest that others follow.
        sentence: the diagnosis.
    """
    found = {**outcome.parts.get(FEATURE, {})}
    found |= {each.rank: each.fate.status.record for each in outcome.ranks if isinstance(each.fate, Stuck)}
    found |= {each.rank: parts[FEATURE] for each in outcome.ranks if FEATURE in (parts := each.parts())}
    records: dict[int, FlightRecord] = {rank: record for rank, record in found.items() if record is not None}
    if until is not None:
        records = {rank: _until(record, until) for rank, record in records.items()}
    if not any(record.entries for record in records.values()):
        return None
    reader = _Reader(outcome, records, base, until)
    return replace(reader.read(), nodeid=nodeid, sentence=sentence)


def _until(record: FlightRecord, until: int) -> FlightRecord:
    kept = tuple(entry for entry in record.entries if entry["time_created_ns"] < until)
    joins = tuple(join for join in record.joins if join[0] < until)
    return replace(record, entries=kept, taken=min(record.taken, until), joins=joins)


class _Reader:
    """Makes lanes of flight records: numbers collectives alike, finds where bars end and who did not come."""

    def __init__(
        self, outcome: ItemOutcome, records: Mapping[int, FlightRecord], base: str, until: int | None
    ) -> None:
        self._outcome = outcome
        self._records = records
        self._base = base
        self._is_part = until is not None
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self._names = _tell_apart(records)
        joins = max((record.joins for record in records.values()), key=len)
        for rank, record in records.items():
            if len(record.joins) == len(joins):  # else it is in a world that others have left
                self._groups |= {(self._names[rank][name], 0): ranks for name, ranks in record.groups.items()}
        deaths = [int(rank.fate.at * 1e9) for rank in outcome.ranks if isinstance(rank.fate, Died)]
        self._end = max([*(record.taken for record in records.values()), *deaths])
        self._keys = {rank: _keys(record, self._names[rank], len(joins)) for rank, record in records.items()}
        self._renumber()
        for back, (_, ranks) in enumerate(reversed(joins[:-1]), 1):
            for gone in {key[1] for keys in self._keys.values() for key in keys if key[1] // WORLD == back}:
                self._groups[DEFAULT_GROUP, gone] = ranks
        # gloo does not record that a collective failed with a connection: it was the last one begun then.
        self._lost = {
            key: int(at * 1e9)
            for each in outcome.ranks
            for at in (*_lost_connections(each), *each.lost_others)
            for key in self._begun_by(each.rank, int(at * 1e9))[-1:]
        }
        begun = (entry["time_created_ns"] for record in records.values() for entry in record.entries)
        self._last_begun = max(begun)
        self._called: dict[Key, dict[int, Entry]] = defaultdict(dict)
        for rank, record in records.items():
            for key, entry in zip(self._keys[rank], record.entries, strict=True):
                if not entry["is_p2p"]:
                    self._called[key][rank] = entry
        self._latest: dict[tuple[str, int, int], int] = {}
        for (name, generation, number), by_rank in self._called.items():
            for rank in by_rank:
                place = name, generation, rank
                self._latest[place] = max(self._latest.get(place, number), number)
        self._missing = {key: self._find_missing(key) for key in self._called}
        self._mismatches = {key for key in self._called if self._is_mismatch(key)}
        self._joined = {
            key: max(entry["time_created_ns"] for entry in by_rank.values())
            for key, by_rank in self._called.items()
        }

    def _begun_by(self, rank: int, at: int) -> list[Key]:
        record, keys = self._records.get(rank), self._keys.get(rank, [])
        calls = zip(keys, () if record is None else record.entries, strict=True)
        return [key for key, entry in calls if entry["time_created_ns"] <= at]

    def _renumber(self) -> None:
        """Count the collectives of each group from the test's beginning, where a rank knows when that was."""
        before: dict[str, int] = {}
        lowest: dict[tuple[str, int], int] = {}
        for rank, record in self._records.items():
            before |= {self._names[rank].get(name, name): n for name, n in record.before.items()}
            for name, generation, number in self._keys[rank]:
                lowest[name, generation] = min(lowest.get((name, generation), number), number)
        for rank, keys in self._keys.items():
            self._keys[rank] = [
                # A group that is gone is not in `before`: count from the first one of the test.
                (name, gone, number - (lowest[name, gone] - 1 if gone else before.get(name, 0)))
                for name, gone, number in keys
            ]

    def read(self) -> Timeline:
        lanes = tuple(self._lane(rank) for rank in self._outcome.ranks)
        begun = min(record.began for record in self._records.values())
        first = min((bar.begun for lane in lanes for bar in lane.bars), default=begun)
        begun = max(begun, first - 1_000_000)  # what a test does before its first call may take long
        return Timeline("", lanes, begun, self._end, "", self._groups, self._records)

    def _lane(self, rank: RankOutcome) -> Lane:
        record = self._records.get(rank.rank)
        if record is None:
            bars = self._inferred(rank)
        else:
            calls = zip(self._keys[rank.rank], record.entries, strict=True)
            bars = tuple([self._bar(key, entry) for key, entry in calls])
        diagnosis, fate = self._outcome.diagnosis, rank.fate
        failed = any(report["outcome"] == "failed" for report in rank.reports)
        place, died_at = "", None
        match fate:
            case Died():
                how, died_at = fate.how, int(fate.at * 1e9)
                place = self._place_of_death(rank, fate, bars)
            case Stuck() if fate.status.state == "idle" and not self._is_part:
                how = "ended the test"
            case Stuck():
                how, place = "was ended by the harness", place_of(fate.status)
                if fate.status.state == "runs" and any(bar.state == "waits" for bar in bars):
                    how = "waits"
            case _:
                how = "failed" if failed else "passed"
        return Lane(
            rank=rank.rank,
            bars=bars,
            missing=tuple(key for key in self._called if rank.rank in self._missing[key]),
            spans=(*self._reported(rank), *_spans_of(bars)),
            fate=how,
            place=place,
            died_at=died_at,
            is_blamed=died_at is not None or (diagnosis is not None and rank.rank in diagnosis.blame),
            is_known=rank.rank in self._records,
        )

    def _bar(self, key: Key, entry: Entry) -> Bar:
        dtypes, shapes = entries.dtypes(entry), entries.shapes(entry)
        begun, state = entry["time_created_ns"], self._state(key, entry)
        recorded = min(int(entry.get("time_discovered_completed_ns") or 0), self._end)
        # Without a record, a collective cannot have ended before its last rank began it.
        end = self._joined[key] if state == "over" and not entry["is_p2p"] else self._end
        if state == "failed" and self._lost.get(key, end) < self._last_begun:  # other cases follow
            end = self._lost[key]
        return Bar(
            key=key,
            op=entries.operation(entry),
            begun=begun,
            end=recorded or (begun if state == "over" and entry["is_p2p"] else end),
            state=state,
            has_end=bool(recorded),
            tensors=", ".join(
                [f"{dtype} {list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=False)]
            ),
            num_bytes=_num_bytes(dtypes, shapes),
            lines=_user_lines(entry, self._base),
            phase=str(entry.get("phase", "")),
            peer=int(entry.get("peer", -1)) if entry["is_p2p"] else None,
            is_mismatch=key in self._mismatches and not entry["is_p2p"],
        )

    def _state(self, key: Key, entry: Entry) -> State:
        if entry.get("failed"):
            return "failed"
        if not entry["retired"]:
            return "waits"
        is_in_vain = not entry["is_p2p"] and (key in self._lost or bool(self._missing[key]))
        return "failed" if is_in_vain else "over"

    def _is_mismatch(self, key: Key) -> bool:
        if len({entries.operation(entry) for entry in self._called[key].values()}) > 1:
            return True
        found = None if self._outcome.diagnosis is None else self._outcome.diagnosis.mismatch
        ranks = self._called[key]
        return found is not None and (
            (0, found.number) == key[1:]
            and all(self._names[rank].get(found.group, found.group) == key[0] for rank in ranks)
        )

    def _find_missing(self, key: Key) -> list[int]:
        """Return the members that have begun neither this collective nor a later one of its group.

        Of a rank without a record that is known from the others: they wait for it, or have lost it there.
        """
        name, gone, number = key
        in_vain = key in self._lost or not all(entry["retired"] for entry in self._called[key].values())
        return [
            rank
            for rank in self._members(key)
            if (self._latest.get((name, gone, rank), 0) < number if rank in self._records else in_vain)
        ]

    def _members(self, key: Key) -> tuple[int, ...]:
        return members_of(self._groups, key[:2], self._outcome.ranks)

    def _inferred(self, rank: RankOutcome) -> tuple[Bar, ...]:
        """Return the collectives that ended on other ranks, and so on the one without a record."""
        bars = []
        for key, by_rank in self._called.items():
            if rank.rank in self._members(key) and rank.rank not in self._missing[key]:
                model = self._bar(key, next(iter(by_rank.values())))
                end = self._joined[key]
                bars.append(replace(model, begun=end, end=end, state="inferred", has_end=False))
        return tuple(bars)

    def _place_of_death(self, rank: RankOutcome, died: Died, bars: tuple[Bar, ...]) -> str:
        if where := user_line(died.output, self._base):
            return where
        # Nothing shows where it was: between two collectives of the others.
        awaited = [key for key in self._called if rank.rank in self._missing[key]]
        last = bars[-1].name if bars else ""
        if not awaited:
            return f"after {last}" if last else ""
        entry = next(iter(self._called[awaited[0]].values()))
        bar = self._bar(awaited[0], entry)
        lines = ", from ".join(bar.lines[:2])
        when = f"between {last} and {bar.name}" if last else f"before {bar.name}"
        return f"{when}{f', in {bar.phase}' if bar.phase else ''}{f': {lines}' if lines else ''}"

    def _reported(self, rank: RankOutcome) -> list[Span]:
        """Return the phases and subtests that the rank has reported."""
        spans = []
        for report in rank.reports:
            is_subtest = report.get("$report_type") != "TestReport"
            context = report.get("_subtest.context") or report.get("context") or {}
            name = f"[{context.get('msg') or 'subtest'}]" if is_subtest else str(report["when"])
            spans.append(Span(name, int(report["start"] * 1e9), int(report["stop"] * 1e9)))
        return spans


def _tell_apart(records: Mapping[int, FlightRecord]) -> dict[int, dict[str, str]]:
    """Return by rank a name for each of its groups: torch may give groups of other ranks the same name."""
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for record in records.values():
        for name, ranks in record.groups.items():
            members[name].add(ranks)
    return {
        rank: {
            name: name if len(members[name]) == 1 else f"{name} of ranks {', '.join(map(str, ranks))}"
            for name, ranks in record.groups.items()
        }
        for rank, record in records.items()
    }


def _keys(record: FlightRecord, names: Mapping[str, str], num_worlds: int) -> list[Key]:
    """Return the key of each call, its number as the group counts; a repaired group takes over a name.

    Args:
        num_worlds: how many default groups ranks have joined in the test. A rank may have joined fewer, or
            have called nothing in the last one.
    """
    joined = [at for at, _ in record.joins][1:]
    generations: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    places = []
    for entry in record.entries:
        world = max(num_worlds, 1) - 1 - bisect.bisect_right(joined, entry["time_created_ns"])
        group, known = entries.group_in_process(entry), generations[entries.group_name(entry), world]
        if group not in known:
            known.append(group)
        places.append((world, group))
    keys = []
    for entry, (world, group) in zip(record.entries, places, strict=True):
        name = entries.group_name(entry)
        known = generations[name, world]
        gone = world * WORLD + len(known) - 1 - known.index(group)
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        keys.append((names.get(name, name), gone, int(number)))
    return keys


def _lost_connections(rank: RankOutcome) -> list[float]:
    """Return when a rank's test, or cases of it, failed with a connection: other cases may follow one."""
    failed = (report for report in rank.reports if report["outcome"] == "failed")
    return [report["stop"] for report in failed if BROKEN_CONNECTION.search(str(report.get("longrepr")))]


def _spans_of(bars: tuple[Bar, ...]) -> list[Span]:
    """Return the phases that the stacks of collectives show, each from its first to its last one."""
    spans: list[Span] = []
    for bar in bars:
        if spans and spans[-1].name == bar.phase:
            spans[-1] = replace(spans[-1], end=max(spans[-1].end, bar.end))
        else:
            spans.append(Span(bar.phase, bar.begun, bar.end, is_measured=False))
    return [span for span in spans if span.name]


def _num_bytes(dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> int | None:
    """Return the bytes of all inputs together, None if the size of a dtype is not known."""
    total = 0
    for dtype, shape in zip(dtypes, shapes, strict=False):
        size = 1 if dtype.startswith("float8") else _SIZES.get(dtype)
        if size is None:
            return None
        total += size * math.prod(shape)
    return total


def _user_lines(entry: Entry, base: str) -> tuple[str, ...]:
    """Return the user's lines, `function() at file:line`, innermost first; none where there is no stack.

    Args:
        base: directory that files are named from.
    """
    return tuple(
        f"{frame['name']}() at {frame['filename'].removeprefix(f'{base}/')}:{frame['line']}"
        for frame in entry.get("frames") or ()
    )
