"""Messages between the ranks of a sweep and the controller. Both sides; must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.features.sweep.points import Kind, Point, Spot

FEATURE = "sweep"


# Ranks say these in their votes, at which all of them and the controller meet


@dataclass(frozen=True, slots=True)
class Joins:
    """The beginning of a sweep on a rank."""

    folders: tuple[str, ...]
    """Absolute paths of the directories."""
    process: int
    """Number of its process."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The undisturbed run of a rank, after which the claim held."""

    spots: tuple[Spot, ...]
    touched: frozenset[str]
    """Paths of files that it was seen to write."""
    appeared: dict[int, frozenset[str]]
    """Paths of files that have changed just before a moment, by its place; another may have written them."""
    kinds: tuple[Kind, ...]
    seconds: float
    """Time that the function took."""
    claim_seconds: float
    reads: bool
    """True if the claim has looked at anything below the directories."""
    part: tuple[int, int]
    """Number of the part of all points that this test runs, from 0, and number of parts."""


@dataclass(frozen=True, slots=True)
class Begins:
    """The rank begins the function under a point, or the claim on what a world before has left."""

    index: int
    """Number of the point in the plan."""
    only_claims: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of the function under a point."""

    has_struck: bool
    error: str = ""
    """The exception that it has raised, in a line."""
    is_lost: bool = False
    """True if that is of a collective that has lost another rank."""
    is_broken: bool = False
    """True if its connections are closed."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The end of the claim."""

    reads: bool
    """True if it has looked at anything below the directories."""
    error: str = ""
    is_lost: bool = False
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """All points have run, or the time for them is over."""


FromRank = Joins | Recorded | Begins | Ran | Claimed | Over


# To ranks


@dataclass(frozen=True, slots=True)
class Lost:
    """Another rank closes its connections, as it was killed or has left the function by an exception."""

    rank: int


@dataclass(frozen=True, slots=True)
class Left:
    """The rank has left the function by an exception, and closes its connections. From a rank."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a point: `problem` is "" if all held."""

    point: Point
    problem: str
    has_struck: bool
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The points of a sweep, and where they are."""

    points: tuple[Point, ...]
    spots: tuple[Spot, ...]
    num_all: int
    """Number of points that there are, of all kinds that were wanted."""
    within: float
    """Seconds that the function and the claim get at each point."""
    lag: float
    """Seconds by which a late rank is late."""
    unseen: tuple[str, ...]
    """Files that were written by code that is not seen, C++ for example."""
    until: float
    """Time of the clock at which no further point begins."""
    num_parts: int = 1
    """Number of tests that share the points of the sweep."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A point at which the last world has ended: its claim runs on the next one."""

    index: int
    errors: dict[int, str]
    """Exceptions of the function on the ranks that were left, in a line each."""
    left: dict[str, str]
    """The directories that it has left, by the name of a place: "0/1" is the second one of rank 0."""
    problem: str = ""
    """Description of how the function ended the world, "" if the point was to end it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A part of the order to run a test again, from a point on."""

    plan: Plan
    results: tuple[Result, ...]
    start: int
    """Number of the first point that has not run."""
    pending: Pending | None
