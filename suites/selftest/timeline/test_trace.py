"""Unit tests of traces for perfetto, with a stand-in for its package: tracks, slices, arrows and notes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.timeline import trace
from lockstep.features.timeline.timeline import Bar, Lane, Span, Timeline
from lockstep.features.timeline.trace import can_write_trace, write_trace

BEGIN, END, INSTANT = "begin", "end", "instant"


class Annotations(list[Any]):
    def add(self) -> Any:
        self.append(SimpleNamespace())
        return self[-1]


def packet() -> Any:
    return SimpleNamespace(
        track_descriptor=SimpleNamespace(process=SimpleNamespace()),
        track_event=SimpleNamespace(flow_ids=[], debug_annotations=Annotations()),
    )


class Builder:
    """Packets in the order in which they were added."""

    def __init__(self) -> None:
        self.packets: list[Any] = []

    def add_packet(self) -> Any:
        self.packets.append(packet())
        return self.packets[-1]

    def serialize(self) -> bytearray:
        return bytearray(b"packed")


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    kinds = SimpleNamespace(TYPE_SLICE_BEGIN=BEGIN, TYPE_SLICE_END=END, TYPE_INSTANT=INSTANT)
    modules = iter([SimpleNamespace(TrackEvent=kinds), SimpleNamespace(TraceProtoBuilder=lambda: made)])
    monkeypatch.setattr(trace.importlib, "import_module", lambda _: next(modules))
    return made


def read(builder: Builder) -> tuple[dict[str, str], dict[str, list[tuple[Any, ...]]]]:
    """Return the parent of each track by its name, and the events of each track: moment, kind, name."""
    names, parents = {}, {}
    events: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for each in builder.packets:
        described, event = vars(each.track_descriptor), each.track_event
        if "uuid" in described:
            own = described.get("name") or described["process"].process_name
            names[described["uuid"]] = own
            parents[own] = names.get(described.get("parent_uuid"), vars(described["process"]).get("pid"))
        else:
            events[names[event.track_uuid]].append(
                (each.timestamp, event.type, vars(event).get("name"), *event.flow_ids)
            )
            assert each.trusted_packet_sequence_id == 1
    assert len({*names}) == len(names)
    return parents, dict(events)


def bar(number: int, begun: int, end: int, op: str = "all_reduce", peer: int | None = None) -> Bar:
    return Bar(("0", 0, number), op, begun, end, "over", True, peer=peer)


def lane(rank: int, *bars: Bar, **more: Any) -> Lane:
    fields: dict[str, Any] = {"missing": (), "spans": (), "fate": "passed", "place": "", **more}
    return Lane(rank, bars, fields.pop("missing"), fields.pop("spans"), **fields)


def test_each_rank_has_tracks_with_its_phases_and_calls(builder: Builder, tmp_path: Path) -> None:
    spans = (Span("call", 10, 90), Span("subtest a", 20, 80), Span("backward", 30, 40), Span("setup", 0, 9))
    calls = (bar(1, 30_000, 50_000), bar(0, 10_000, 10_200))
    write_trace(Timeline("id", (lane(3, *calls, spans=spans),), 0, 100), tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes() == b"packed"
    parents, events = read(builder)
    rank = "rank 3: passed"
    assert parents == {
        rank: 4,
        "phases": rank,
        "subtests and fixtures": rank,
        "of the step": rank,
        "collectives": rank,
    }
    assert events["phases"] == [(10, BEGIN, "call"), (90, END, None), (0, BEGIN, "setup"), (9, END, None)]
    assert events["subtests and fixtures"] == [(20, BEGIN, "subtest a"), (80, END, None)]
    assert events["of the step"] == [(30, BEGIN, "backward"), (40, END, None)]
    # A short call is as wide as can be seen.
    assert [each[:2] for each in events["collectives"]] == [
        (10_000, BEGIN),
        (11_000, END),
        (30_000, BEGIN),
        (50_000, END),
    ]


def test_arrows_lead_over_the_bars_of_one_collective(builder: Builder, tmp_path: Path) -> None:
    lanes = (
        lane(0, bar(0, 10, 20), bar(1, 5000, 6000)),
        lane(1, bar(1, 5100, 6000), bar(0, 12, 20), bar(9, 9000, 9500, "send", peer=0)),
    )
    write_trace(Timeline("id", lanes, 0, 10_000), tmp_path / "trace")
    flows = [
        (each.timestamp, *each.track_event.flow_ids)
        for each in builder.packets
        if getattr(each.track_event, "type", "") == BEGIN
    ]
    assert flows == [(10, 1), (5000, 2), (12, 1), (5100, 2), (9000,)]
    notes = [
        [(note.name, note.string_value) for note in each.track_event.debug_annotations]
        for each in builder.packets
        if getattr(each.track_event, "type", "") == BEGIN
    ]
    assert all(notes)
    assert {name for each in notes for name, _ in each} == {"is"}


def test_calls_that_overlap_have_tracks_of_their_own(builder: Builder, tmp_path: Path) -> None:
    calls = [bar(0, 0, 5000), bar(1, 2000, 3000), bar(2, 3000, 9000), bar(3, 5000, 6000)]
    write_trace(Timeline("id", (lane(0, *calls),), 0, 9000), tmp_path / "trace")
    tracks: defaultdict[int, list[int]] = defaultdict(list)
    for each in builder.packets:
        if getattr(each.track_event, "type", "") == BEGIN:
            tracks[each.track_event.track_uuid].append(each.timestamp)
    assert list(tracks.values()) == [[0, 5000], [2000, 3000]]


def test_a_death_and_a_collective_that_never_came_are_shown(builder: Builder, tmp_path: Path) -> None:
    dead = lane(1, missing=(("0", 0, 4),), died_at=700, fate="died: SIGKILL")
    waits = lane(0, bar(4, 500, 900))
    write_trace(Timeline("id", (waits, dead), 0, 900), tmp_path / "trace")
    parents, events = read(builder)
    assert events["end"] == [(700, INSTANT, "died: SIGKILL")]
    [(begun, _, name), (end, _, _)] = events["missing"]
    assert (begun, end) == (500, 900)
    assert name == f"never came: {waits.bars[0].name}"
    assert parents["missing"] == parents["end"] == "rank 1: died: SIGKILL"


def test_a_trace_needs_the_whole_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(trace.importlib, "import_module", lambda name: asked.append(name) or "a module")
    assert can_write_trace()
    assert asked == [
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        "perfetto.trace_builder.proto_builder",
    ]

    def lacks(name: str) -> str:
        if name == asked[1]:
            raise ModuleNotFoundError(name)
        return name

    monkeypatch.setattr(trace.importlib, "import_module", lacks)
    assert not can_write_trace()
