"""Changes between two tables: the claims with another outcome. Controller; must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.conformance.table import Claim, Outcome, Table
from lockstep.features.causes.causes import brief


@dataclass(frozen=True)
class Change:
    """A claim of an engine before and after.

    Attributes:
        words: the cases held of all, before and after, and the reasons of the later table for the others.
    """

    claim: Claim
    before: Outcome
    after: Outcome
    words: str


def changes(old: Table, new: Table, engine: str) -> dict[tuple[Outcome, Outcome], list[Change]]:
    """Return what changed of an engine that both tables have, by outcomes: what broke first.

    Claims that one table does not have, or did not run, are left out.
    """
    found: dict[tuple[Outcome, Outcome], list[Change]] = {}
    for claim in new.claims.values():
        before, after = old.cell(claim, engine), new.cell(claim, engine)
        if Outcome.NOT_RUN in (before.outcome, after.outcome):
            continue
        counts = [
            f"{table.cell(claim, engine).held}/{table.num_cases(claim, engine)}" for table in (old, new)
        ]
        if before.outcome == after.outcome and (after.outcome == Outcome.HELD or counts[0] == counts[1]):
            continue
        why = [brief(case.text) for case in after.having(Outcome.BROKEN)[:1]] or after.reasons(after.outcome)
        change = Change(claim, before.outcome, after.outcome, ": ".join([" → ".join(counts), *why]))
        found.setdefault((before.outcome, after.outcome), []).append(change)
    order = list(Outcome)
    return dict(sorted(found.items(), key=lambda item: [order.index(each) for each in reversed(item[0])]))


def only_in(table: Table, other: Table, engine: str) -> list[Claim]:
    """Return the claims that only the first of two tables has run on an engine."""
    return [
        claim
        for claim in table.claims.values()
        if table.cell(claim, engine).outcome != Outcome.NOT_RUN
        and other.cell(claim, engine).outcome == Outcome.NOT_RUN
    ]


def has_worsened(old: Table, new: Table) -> bool:
    """Return whether an engine breaks, in the new table, a claim that it did not break in the old one."""
    return any(
        after == Outcome.BROKEN and before != Outcome.BROKEN
        for engine in new.engines
        for before, after in changes(old, new, engine)
    )
