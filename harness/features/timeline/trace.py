"""A timeline as a trace for ui.perfetto.dev, by the package `perfetto`. In the controller."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

from lockstep.features.timeline.svg import describe
from lockstep.features.timeline.timeline import Bar, Lane, Span, Timeline

_SEQUENCE = 1
"""The one writer of the trace."""


_MODULES = "perfetto.protos.perfetto.trace.perfetto_trace_pb2", "perfetto.trace_builder.proto_builder"
"""Messages and builder: not typed, and not installed everywhere."""


def can_write_trace() -> bool:
    """Return whether `perfetto` is installed; a mere folder of that name can be imported, too."""
    try:
        return all(importlib.import_module(name) for name in _MODULES)
    except ImportError:
        return False


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a track for each rank with its phases and calls; arrows lead over the bars of one collective.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_bytes(_Trace(timeline).packed())


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        messages, builder = map(importlib.import_module, _MODULES)
        self._kinds: Any = messages.TrackEvent
        self._builder: Any = builder.TraceProtoBuilder()
        self._ids = itertools.count(1)
        self._flows = {key: next(self._ids) for key in timeline.joins}

    def packed(self) -> bytes:
        for lane in self._timeline.lanes:
            self._lane(lane)
        return bytes(self._builder.serialize())

    def _lane(self, lane: Lane) -> None:
        process = self._track(f"rank {lane.rank}: {lane.fate}", pid=lane.rank + 1)
        for depth, spans in itertools.groupby(sorted(lane.spans, key=_depth), key=_depth):
            track = self._track(("phases", "subtests and fixtures", "of the step")[depth], parent=process)
            for span in spans:
                self._slice(track, span.begun, span.end, span.name)
        tracks: list[tuple[int, int]] = []
        for bar in sorted(lane.bars, key=lambda each: each.begun):
            free = next((i for i, (_, end) in enumerate(tracks) if end <= bar.begun), None)
            if free is None:  # what overlaps has a track of its own
                free = len(tracks)
                tracks.append((self._track("collectives", parent=process), 0))
            track, end = tracks[free][0], max(bar.end, bar.begun + 1000)
            tracks[free] = track, end
            self._bar(track, lane.rank, bar, end)
        if lane.died_at is not None:
            track = self._track("end", parent=process)
            self._event(track, lane.died_at, self._kinds.TYPE_INSTANT).name = lane.fate
        for key in lane.missing:
            begun = min(bar.begun for bar in self._timeline.joins[key].values())
            name = next(iter(self._timeline.joins[key].values())).name
            self._slice(
                self._track("missing", parent=process), begun, self._timeline.end, f"never came: {name}"
            )

    def _track(self, name: str, pid: int | None = None, parent: int | None = None) -> int:
        packet = self._builder.add_packet()
        number = next(self._ids) + 1_000_000
        packet.track_descriptor.uuid = number
        if pid is None:
            packet.track_descriptor.name = name
            packet.track_descriptor.parent_uuid = parent
        else:
            packet.track_descriptor.process.pid = pid
            packet.track_descriptor.process.process_name = name
        return number

    def _event(self, track: int, at: int, kind: int) -> Any:
        packet = self._builder.add_packet()
        packet.timestamp = at
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event

    def _slice(self, track: int, begun: int, end: int, name: str) -> Any:
        event = self._event(track, begun, self._kinds.TYPE_SLICE_BEGIN)
        event.name = name
        self._event(track, end, self._kinds.TYPE_SLICE_END)
        return event

    def _bar(self, track: int, rank: int, bar: Bar, end: int) -> None:
        event = self._slice(track, bar.begun, end, bar.name)
        if bar.key in self._flows:
            event.flow_ids.append(self._flows[bar.key])
        for line in describe(rank, bar, self._timeline).splitlines()[1:]:
            note = event.debug_annotations.add()
            note.name, note.string_value = "is", line


def _depth(span: Span) -> int:
    """Return 0 for a phase of pytest, 1 for what is inside, 2 for a part of a training step."""
    if span.name in ("setup", "call", "teardown"):
        return 0
    return 2 if span.name in ("forward", "backward", "optimizer") else 1
