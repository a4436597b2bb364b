"""Broken cases grouped by their cause, the most frequent first. Controller; must not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.conformance.registry import DEFAULT, suites_are_installed
from lockstep.conformance.table import Case, Claim, Outcome, Table
from lockstep.features.causes.causes import Ran, cause_of, narrow


@dataclass(frozen=True)
class CommonFailure:
    """A failure that broken cases of one engine have in common.

    Attributes:
        where: the deepest line of the user's code, "file.py:12"; "" if the text names none.
        what: the exception's type and its message, without numbers and ids.
        broken: each claim with those of its cases.
    """

    engine: str
    where: str
    what: str
    broken: tuple[tuple[Claim, Case], ...]
    narrowed: str = ""
    """The line that runs all of them, and as little else as was found; "" if there is one only."""

    @property
    def claims(self) -> dict[str, list[str]]:
        """The names of the cases, by claim; none for a test without subtests."""
        found: dict[str, list[str]] = {}
        for claim, case in self.broken:
            found.setdefault(claim.id, []).extend([case.name] if case.name else [])
        return found

    @property
    def rerun(self) -> str:
        """The line that runs the first of the cases again."""
        claim, case = self.broken[0]
        printed = [line for line in case.text.splitlines() if line.startswith("pytest ")]
        if printed:
            return printed[-1]
        return _command([claim.id], self.engine)


def causes(table: Table) -> list[CommonFailure]:
    """Return the causes of all broken cases: of each engine those of most cases first."""
    found: list[CommonFailure] = []
    for engine in table.engines:
        cells = [(claim, case) for claim in table.claims.values() for case in table.cell(claim, engine).cases]
        by_key: dict[tuple[str, str], list[tuple[Claim, Case]]] = {}
        for claim, case in cells:
            if case.outcome == Outcome.BROKEN:
                by_key.setdefault(cause_of(case.text), []).append((claim, case))
        ran = [Ran(claim.id, case.name) for claim, case in cells]
        for key, broken in sorted(by_key.items(), key=lambda item: -len(item[1])):
            found.append(_narrowed(CommonFailure(engine, *key, tuple(broken)), ran))
    return found


def _narrowed(cause: CommonFailure, ran: list[Ran]) -> CommonFailure:
    if len(cause.broken) == 1:
        return cause
    failed = [Ran(claim.id, case.name) for claim, case in cause.broken]
    return replace(cause, narrowed=_command(narrow(failed, ran).arguments, cause.engine))


def _command(arguments: Sequence[str], engine: str) -> str:
    name = engine.split(" ")[0]  # without the version of torch
    of_suites = bool(arguments) and arguments[0].split("/")[0] == "suites"
    if of_suites and suites_are_installed():  # pytest has no such path there
        return shlex.join(["python", "-m", "lockstep", "conformance", "--engine", name, *arguments])
    chosen = [] if name == DEFAULT else ["--engine", name]
    return shlex.join(["pytest", *arguments, "-p", "lockstep.conformance.plugin", *chosen])
