"""The timeline of a test as plain data: a lane a rank, a bar a call, joins of collectives, the fault.

Runs in the controller; must not import torch.

Times are of one host's clock, nanoseconds since the epoch: those of ranks can be compared. gloo records when
a collective began and whether it is over, but not when it ended. It cannot have ended before its last rank
began it: that is where a bar ends then (`Bar.has_end` is False).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from lockstep import flight_entries as entries
from lockstep.backends import BROKEN_CONNECTION
from lockstep.features.timeline import FEATURE
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
Key = tuple[str, int, int]
"""A collective of a test: its group, which group of that name, counted back from the last, and its number."""

_WORLD = 1000
"""Added to which group it is, for each default group that ranks have joined since: more than a name has."""

State = Literal["over", "waits", "failed", "inferred"]
"""State of a call: ended; in flight at the end; ended without all ranks; or, where its rank died, known from
those of others."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A call of a rank."""

    key: Key
    op: str
    begun: int
    end: int
    state: State
    has_end: bool
    """True if `end` was recorded; else it is the earliest that is possible, or the end of the picture."""
    tensors: str = ""
    """dtype and shape of each input."""
    num_bytes: int | None = None
    """Bytes of all inputs."""
    lines: tuple[str, ...] = ()
    """Lines of the user, innermost first: `function() at file:line`."""
    phase: str = ""
    peer: int | None = None
    """The other rank of a send or a receive; None of a collective."""
    is_mismatch: bool = False

    @property
    def line(self) -> str:
        """The user's innermost line, "" if it is not known."""
        return self.lines[0] if self.lines else ""

    @property
    def is_in_vain(self) -> bool:
        """True if it waits, or has ended without all ranks."""
        return self.state in ("waits", "failed")

    @property
    def worlds_ago(self) -> int:
        """The number of default groups that ranks have joined since."""
        return self.key[1] // _WORLD

    @property
    def name(self) -> str:
        """The operation with its number: `all_reduce #3`, or with the peer: `send to 1`."""
        return self.op if self.peer is not None else f"{self.op} #{self.key[2]}"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a rank: setup, call, a subtest, backward, ..."""

    name: str
    begun: int
    end: int
    is_measured: bool = True
    """True if the rank timed it; else it goes from the first to the last collective with it in the stack."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The calls of a rank, its phases and its end."""

    rank: int
    bars: tuple[Bar, ...]
    missing: tuple[Key, ...]
    """The collectives that others began, and waited for, and this rank did not."""
    spans: tuple[Span, ...]
    fate: str
    """End of the rank in a few words: "passed", "died: SIGKILL", "waits"."""
    place: str
    """Line or collective of the rank at the end; "" if it had ended the test."""
    died_at: int | None = None
    is_blamed: bool = False
    is_known: bool = True
    """True if its record could be read: that of a dead rank is lost."""


@dataclass(frozen=True)
class Timeline:
    """The lanes of all ranks in one test."""

    nodeid: str
    lanes: tuple[Lane, ...]
    begun: int
    end: int
    sentence: str = ""
    """The diagnosis."""
    groups: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """The ranks of groups, by what a key has of them."""
    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    num_left_out: int = 0
    """Calls of all ranks together that are older than those shown."""

    @cached_property
    def joins(self) -> dict[Key, dict[int, Bar]]:
        """Return the bars of each collective by rank, in the order in which the collectives began."""
        found: dict[Key, dict[int, Bar]] = defaultdict(dict)
        bars = ((bar, lane.rank) for lane in self.lanes for bar in lane.bars if bar.peer is None)
        for bar, rank in sorted(bars, key=lambda each: each[0].begun):
            found[bar.key][rank] = bar
        return dict(found)

    @cached_property
    def at_fault(self) -> frozenset[int]:
        """Return the ranks to blame, and those that others wait for and that wait for no other themselves."""
        late = [lane for lane in self.lanes if lane.missing]
        free = [lane for lane in late if not any(bar.is_in_vain for bar in lane.bars)]
        blamed = [lane for lane in self.lanes if lane.is_blamed]
        return frozenset(lane.rank for lane in (*blamed, *free)) or frozenset(lane.rank for lane in late)

    def has_fault(self) -> bool:
        """Return whether a rank died, or a collective lacks one."""
        return any(
            lane.missing or lane.died_at is not None or any(bar.is_in_vain for bar in lane.bars)
            for lane in self.lanes
        )

    def members(self, group: str, gone: int = 0) -> tuple[int, ...]:
        """Return the ranks of a group, the last one of its name, or the one that was `gone` before that."""
        return _members(self.groups, (group, gone), self.lanes)

    def letters(self) -> dict[str, str]:
        """Return a letter for each group but the default one: torch's names of them may be long."""
        names = dict.fromkeys(key[0] for key in self.joins)
        others = [name for name in names if name != DEFAULT_GROUP]
        return {name: chr(ord("A") + i) if i < 26 else f"G{i}" for i, name in enumerate(others)}

    def last(self, most: int) -> Timeline:
        """Return this timeline with at most the latest `most` collectives, and what the ranks did since."""
        if len(self.joins) <= most:
            return self
        kept = list(self.joins)[-most:]
        begun = min(bar.begun for key in kept for bar in self.joins[key].values())
        lanes, left_out = [], 0
        for lane in self.lanes:
            bars = tuple(bar for bar in lane.bars if bar.key in kept or bar.begun >= begun)
            spans = tuple(
                replace(span, begun=max(span.begun, begun)) for span in lane.spans if span.end > begun
            )
            left_out += len(lane.bars) - len(bars)
            lanes.append(replace(lane, bars=bars, spans=spans))
        return replace(self, lanes=tuple(lanes), begun=begun, num_left_out=left_out)


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
        self._base = f"{base}/"
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
            for gone in {key[1] for keys in self._keys.values() for key in keys if key[1] // _WORLD == back}:
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
        return _members(self._groups, key[:2], self._outcome.ranks)

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


def _members(
    groups: Mapping[tuple[str, int], tuple[int, ...]],
    group: tuple[str, int],
    ranks: Iterable[Lane | RankOutcome],
) -> tuple[int, ...]:
    # Records have those of living groups: one that is gone had, most likely, those of its name.
    known = groups.get(group) or groups.get((group[0], 0))
    return known or tuple(each.rank for each in ranks)


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
        gone = world * _WORLD + len(known) - 1 - known.index(group)
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
        base: directory that files are named from, with a slash at its end.
    """
    return tuple(
        f"{frame['name']}() at {frame['filename'].removeprefix(base)}:{frame['line']}"
        for frame in entry.get("frames") or ()
    )
