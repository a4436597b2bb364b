"""Claims x engines: what was found, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from harness.conformance.outcome import Outcome, Point


@dataclass(frozen=True)
class Claim:
    """A test without its engine. ``id`` is its node id when there is one engine only."""

    id: str
    title: str = ""
    """First sentence of the test's docstring."""

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        return tuple(self.id.partition("[")[0].split("::"))

    @property
    def file(self) -> str:
        return self._parts[0]

    @property
    def suite(self) -> str:
        """The directory of the test's file."""
        return self.file.rpartition("/")[0] or "."

    @property
    def group(self) -> str:
        """File and class, where tests stand together."""
        return " ".join(self._parts[:-1])

    @property
    def name(self) -> str:
        """The test's name in words."""
        return self._parts[-1].removeprefix("test_").replace("_", " ")

    @property
    def parameters(self) -> str:
        return self.id.partition("[")[2].removesuffix("]")


@dataclass(frozen=True)
class Cell:
    """What one engine made of one claim. No points: the test was not run, or did not come to its end."""

    points: tuple[Point, ...] = ()
    seconds: float = 0.0
    """Set-up, call and tear-down."""

    @cached_property
    def outcome(self) -> Outcome:
        found = {point.outcome for point in self.points}
        return next((outcome for outcome in Outcome if outcome in found), Outcome.NOT_RUN)

    @property
    def held(self) -> int:
        return sum(point.outcome.holds for point in self.points)

    @property
    def num_named(self) -> int:
        return sum(bool(point.name) for point in self.points)

    @property
    def came_through(self) -> bool:
        """Whether the test itself came to its end, however its subtests fared."""
        return bool(self.points) and all(point.name or point.outcome.holds for point in self.points)

    def having(self, outcome: Outcome) -> list[Point]:
        return [point for point in self.points if point.outcome == outcome]


@dataclass(frozen=True)
class Share:
    """How much of something an engine holds."""

    held: int
    asked: int

    def __str__(self) -> str:
        # Rounded down: 100 % means all.
        return f"{self.held} of {self.asked} ({self.percent} %)" if self.asked else "none asked"

    @property
    def percent(self) -> int:
        return 100 * self.held // self.asked if self.asked else 0


@dataclass(frozen=True)
class Run:
    """One run of pytest that a table comes from."""

    when: str
    """ISO 8601, in UTC."""
    seconds: float
    arguments: tuple[str, ...]
    versions: dict[str, str]
    ended: str
    """"complete", or why it ended before."""
    deselected: tuple[str, ...] = ()
    """Claims that its arguments left out."""


@dataclass
class Table:
    """Claims in the order in which they were collected, engines in which they were asked for."""

    engines: list[str]
    claims: dict[str, Claim] = field(default_factory=dict)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    """By claim, then by engine."""
    runs: list[Run] = field(default_factory=list)

    def cell(self, claim: Claim, engine: str) -> Cell:
        return self.cells.get(claim.id, {}).get(engine, Cell())

    def asked(self, claim: Claim, engine: str) -> int:
        """Return how many points of the claim the engine was asked.

        One that did not come to the end of the claim's subtests was asked as many as the others.
        """
        cells = self.cells.get(claim.id, {})
        mine = cells.get(engine, Cell())
        if mine.came_through:
            return len(mine.points)
        return max((cell.num_named for cell in cells.values()), default=0) or 1

    def offered(self, claim: Claim, engine: str) -> int:
        """Return how many of the points that the engine was asked are about something it offers."""
        cell = self.cell(claim, engine)
        if cell.outcome == Outcome.NOT_OFFERED:
            return 0
        return self.asked(claim, engine) - len(cell.having(Outcome.NOT_OFFERED))

    def share(self, engine: str, claims: Iterable[Claim]) -> Share:
        """Return how many points of these claims the engine holds."""
        claims = list(claims)
        held = sum(self.cell(claim, engine).held for claim in claims)
        return Share(held, sum(self.asked(claim, engine) for claim in claims))

    def share_of_offered(self, engine: str, claims: Iterable[Claim]) -> Share:
        """Return how many of the points that are about something it offers the engine holds."""
        claims = list(claims)
        return Share(self.share(engine, claims).held, sum(self.offered(claim, engine) for claim in claims))

    def claims_held(self, engine: str, claims: Iterable[Claim]) -> Share:
        """Return how many of these claims the engine holds, wherever it offers what they are about."""
        claims = list(claims)
        return Share(sum(self.holds(claim, engine) for claim in claims), len(claims))

    def holds(self, claim: Claim, engine: str) -> bool:
        cell = self.cell(claim, engine)
        return cell.outcome.holds and not cell.having(Outcome.DEVIATION)

    def only(self, engine: str) -> list[Claim]:
        """Return the claims that this engine holds, and no other although each was asked."""
        others = [other for other in self.engines if other != engine]
        if not others:
            return []
        return [
            claim
            for claim in self.claims.values()
            if self.holds(claim, engine)
            and all(self.cell(claim, other).outcome != Outcome.NOT_RUN for other in others)
            and not any(self.holds(claim, other) for other in others)
        ]

    def not_run(self, engine: str) -> list[Claim]:
        return [
            claim for claim in self.claims.values() if self.cell(claim, engine).outcome == Outcome.NOT_RUN
        ]

    def by(self, key: str) -> dict[str, list[Claim]]:
        """Return the claims under each of their suites or groups."""
        found: dict[str, list[Claim]] = {}
        for claim in self.claims.values():
            found.setdefault(getattr(claim, key), []).append(claim)
        return found
