"""Points of a sweep: what a rank does that a fault may strike, the kinds of faults, which of them run.

Used on both sides; must not import torch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from lockstep.bounds import shown

Kind = Literal["kill", "torn", "all", "power", "fail", "full", "delay", "invisible", "order"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_KINDS: tuple[Kind, ...] = ("kill", "torn", "all", "fail", "full", "delay", "invisible", "order")
KILLS = frozenset[Kind]({"kill", "torn", "all", "power"})
"""Kinds that end the world: what they leave is looked at on a new one."""
OF_ONE = frozenset[Kind]({"kill", "torn"})
"""Kinds that end one rank alone."""
MAY_MISS = frozenset[Kind]({"invisible", "order"})
"""Kinds that may make no difference where they strike."""
HARMLESS = frozenset[Kind]({"delay", "order"})
"""Kinds that break nothing: under them the function has to succeed."""

COLLECTIVE, END = "collective", "end"
FILE_OPS = ("open", "write", "truncate", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")
OPS = (COLLECTIVE, *FILE_OPS, END)
_FILLS = frozenset({"open", "write", "link", "rename", "mkdir"})
"""Operations that a full disk refuses."""
WHAT = {
    "kill": "is killed (SIGKILL)",
    "torn": "is killed (SIGKILL) half-way",
    "all": "and all others are killed at once",
    "power": "and all others lose power: what was not synced is lost",
    "fail": "gets an exception",
    "full": "finds the disk full (ENOSPC)",
    "delay": "is late",
    "invisible": "does not see yet what others write",
    "order": "lets another thread go first",
}
_FORM = "write a point as reports name it, such as 'kill rank 1 collective 7' or 'full rank 0 write 2'"


@dataclass(frozen=True, slots=True)
class Spot:
    """A moment of the recorded run of a rank: before an operation, or at the end."""

    rank: int
    op: str
    number: int
    """Number of it among those of this name on the rank, from 1."""
    place: int
    """Number of it among all moments of the rank, from 0."""
    text: str
    """Description: "all_gather of 24 B at save.py:41; after rename of part-1"."""
    is_contended: bool = False
    """True if another thread of the rank uses the same group."""

    def kinds(self) -> Iterable[Kind]:
        """Return the kinds of faults that make a difference here."""
        yield from ("kill", "all", "power", "delay")
        if self.op != END:
            yield "fail"
        if self.op in _FILLS:
            yield "full"
        if self.op == "write":
            yield "torn"
        if self.op == COLLECTIVE:
            yield "invisible"
        if self.is_contended:
            yield "order"


@dataclass(frozen=True, slots=True)
class Point:
    """A fault of one kind, on one rank, at one moment; `str` is its name, which `--sweep-point` takes."""

    kind: Kind
    rank: int
    op: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} {self.op} {self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the name of a point.

        Raises:
            ValueError: it has another form; the message says what to write.
        """
        match text.split():
            case [kind, "rank", rank, op, number] if rank.isdecimal() and number.isdecimal():
                known = next((each for each in KINDS if each == kind), None)
                if known is None:
                    raise ValueError(f"{shown(text)}: the kinds are {', '.join(KINDS)}")
                if op not in OPS:
                    raise ValueError(f"{shown(text)}: the operations are {', '.join(OPS)}")
                return cls(known, int(rank[:9]), op, int(number[:9]))
        raise ValueError(f"{shown(text)}: {_FORM}")

    def is_at(self, spot: Spot) -> bool:
        return (self.rank, self.op, self.number) == (spot.rank, spot.op, spot.number)


def points_of(spots: Iterable[Spot], kinds: Sequence[Kind]) -> list[Point]:
    """Return a point for each moment and each kind that makes a difference there."""
    found = {spot: set(spot.kinds()) for spot in spots}
    return [
        Point(kind, spot.rank, spot.op, spot.number)
        for kind in kinds
        for spot, possible in found.items()
        if kind in possible
    ]


def choose(points: Sequence[Point], most: int | None, seed: int) -> list[Point]:
    """Draw at most so many points, spread over kinds, ranks and phases; return them in a drawn order.

    They are cut into as many parts as are wanted, in the order of kind, rank and moment, and one of each part
    is drawn. In the drawn order, a run that ends early has looked at all phases, too.
    """
    drawing = random.Random(seed)
    count = len(points) if most is None else min(most, len(points))
    bounds = [part * len(points) // count for part in range(count + 1)] if count else []
    chosen = [points[drawing.randrange(*bounds[part : part + 2])] for part in range(count)]
    drawing.shuffle(chosen)
    return chosen


def describe_spots(spots: Iterable[Spot]) -> str:
    """Count the moments of each rank: "rank 0: collective 1 to 4, write 1 to 2, end 1"."""
    counts: dict[int, Counter[str]] = {}
    for spot in spots:
        counts.setdefault(spot.rank, Counter())[spot.op] += 1
    lines = []
    for rank, ops in sorted(counts.items()):
        words = [f"{op} 1" if count == 1 else f"{op} 1 to {count}" for op, count in ops.items()]
        lines.append(f"rank {rank}: {', '.join(words)}")
    return "; ".join(lines)
