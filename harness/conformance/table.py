"""Claims x engines: outcomes, and what follows from them. Must not import torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Outcome(StrEnum):
    """Ordered: of the outcomes of a claim's cases, the first in this list is the claim's."""

    BROKEN = "broken"
    MENDED = "mended"
    DEVIATION = "known deviation"
    HELD = "held"
    NOT_OFFERED = "not offered"
    SKIPPED = "skipped"
    NOT_RUN = "not run"

    @property
    def holds(self) -> bool:
        """True if the engine did what was claimed, expected or not."""
        return self in (Outcome.HELD, Outcome.MENDED)


@dataclass(frozen=True, slots=True)
class Case:
    """One subtest of a claim, or, with no name, the test itself."""

    name: str
    outcome: Outcome
    reason: str = ""
    """The capability that is not offered, why the engine deviates, why the test was skipped."""
    text: str = ""
    """pytest's report of a failure."""


@dataclass(frozen=True)
class Claim:
    """A test without its engine. `id` is its node id when there is one engine only."""

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
    """One engine and one claim. No cases: the test was not run, or did not finish."""

    cases: tuple[Case, ...] = ()
    seconds: float = 0.0
    """Seconds of set-up, call and tear-down."""

    @cached_property
    def outcome(self) -> Outcome:
        found = {case.outcome for case in self.cases}
        return next((outcome for outcome in Outcome if outcome in found), Outcome.NOT_RUN)

    @property
    def held(self) -> int:
        return sum(case.outcome.holds for case in self.cases)

    @property
    def finished(self) -> bool:
        """True if the test itself finished, whatever became of its subtests."""
        return bool(self.cases) and all(case.name or case.outcome.holds for case in self.cases)

    def having(self, outcome: Outcome) -> list[Case]:
        return [case for case in self.cases if case.outcome == outcome]

    def reasons(self, outcome: Outcome | str) -> list[str]:
        """Return the reasons that the cases of this outcome give, each once."""
        found = (case.reason for case in self.cases if case.outcome == outcome)
        return list(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class Share:
    """The number of cases or claims that an engine holds, and of all."""

    held: int
    total: int

    def __str__(self) -> str:
        # Rounded down: 100 % means all.
        return f"{self.held} of {self.total} ({self.percent} %)" if self.total else "none"

    @property
    def percent(self) -> int:
        return 100 * self.held // self.total if self.total else 0


@dataclass(frozen=True)
class SuiteRun:
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
    """Claims in the order of collection, engines in the order of the options that name them."""

    engines: list[str]
    claims: dict[str, Claim] = field(default_factory=dict)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    """Cells by claim, then by engine."""
    runs: list[SuiteRun] = field(default_factory=list)
    warnings: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of tests that gave each warning that was not an error, by engine."""

    def cell(self, claim: Claim, engine: str) -> Cell:
        return self.cells.get(claim.id, {}).get(engine, Cell())

    def num_cases(self, claim: Claim, engine: str) -> int:
        """Return the number of the claim's cases for the engine.

        Where the test did not finish its subtests, it is that of the other engines.
        """
        cells = self.cells.get(claim.id, {})
        mine = cells.get(engine, Cell())
        if mine.finished:
            return len(mine.cases)
        named = (sum(bool(case.name) for case in cell.cases) for cell in cells.values())
        return max(named, default=0) or 1

    def num_offered(self, claim: Claim, engine: str) -> int:
        """Return how many of the claim's cases are about something that the engine offers."""
        cell = self.cell(claim, engine)
        if cell.outcome == Outcome.NOT_OFFERED:
            return 0
        return self.num_cases(claim, engine) - len(cell.having(Outcome.NOT_OFFERED))

    def share(self, engine: str, claims: Collection[Claim]) -> Share:
        """Return how many cases of these claims the engine holds."""
        held = sum(self.cell(claim, engine).held for claim in claims)
        return Share(held, sum(self.num_cases(claim, engine) for claim in claims))

    def share_of_offered(self, engine: str, claims: Collection[Claim]) -> Share:
        """Return how many of the cases that are about something it offers the engine holds."""
        offered = sum(self.num_offered(claim, engine) for claim in claims)
        return Share(self.share(engine, claims).held, offered)

    def claims_held(self, engine: str, claims: Collection[Claim]) -> Share:
        """Return how many of these claims the engine holds, wherever it offers what they are about."""
        return Share(sum(self.holds(claim, engine) for claim in claims), len(claims))

    def holds(self, claim: Claim, engine: str) -> bool:
        cell = self.cell(claim, engine)
        return cell.outcome.holds and not cell.having(Outcome.DEVIATION)

    def only(self, engine: str) -> list[Claim]:
        """Return the claims that this engine holds and no other does, although each was run."""
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

    def tests(self, claims: Collection[Claim]) -> list[list[Claim]]:
        """Return these claims by the test that they are parameter sets of."""
        found: dict[tuple[str, str], list[Claim]] = {}
        for claim in claims:
            found.setdefault((claim.group, claim.name), []).append(claim)
        return list(found.values())

    def together(self, claims: Collection[Claim], engine: str) -> Cell:
        """Return one cell of these claims: all of their cases."""
        cells = [self.cell(claim, engine) for claim in claims]
        cases = tuple(case for cell in cells for case in cell.cases)
        return Cell(cases, sum(cell.seconds for cell in cells))

    def by(self, key: str) -> dict[str, list[Claim]]:
        """Return the claims under each of their suites or groups."""
        found: dict[str, list[Claim]] = {}
        for claim in self.claims.values():
            found.setdefault(getattr(claim, key), []).append(claim)
        return found
