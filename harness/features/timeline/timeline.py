"""The timeline of a test as plain data: a lane a rank, a bar a call, joins of collectives, the fault.

Runs in the controller; must not import torch.

Times are of one host's clock, nanoseconds since the epoch: those of ranks can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from lockstep.flight_entries import DEFAULT_GROUP, FlightRecord
from lockstep.world.outcome import RankOutcome

Key = tuple[str, int, int]
"""A collective of a test: its group, which group of that name, counted back from the last, and its number."""

WORLD = 1000
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
        return self.key[1] // WORLD

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
        return members_of(self.groups, (group, gone), self.lanes)

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


def members_of(
    groups: Mapping[tuple[str, int], tuple[int, ...]],
    group: tuple[str, int],
    ranks: Iterable[Lane | RankOutcome],
) -> tuple[int, ...]:
    """Return the ranks of a group, given by name and which of that name; all `ranks` if it is not known."""
    # Records have those of living groups: one that is gone had, most likely, those of its name.
    known = groups.get(group) or groups.get((group[0], 0))
    return known or tuple(each.rank for each in ranks)
