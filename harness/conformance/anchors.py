"""Where on the page something stands."""

from __future__ import annotations

from harness.conformance.table import Claim, Table
from harness.conformance.telling import known_deviations


class Anchors:
    """The ids of what the page's cells link to; looked up thousands of times."""

    def __init__(self, table: Table) -> None:
        self._engines = {engine: number for number, engine in enumerate(table.engines)}
        self._claims = {claim: number for number, claim in enumerate(table.claims)}
        self._groups = {group: number for number, group in enumerate(table.by("group"))}
        self._deviations = {key: number for number, key in enumerate(known_deviations(table))}

    def of_group(self, claim: Claim) -> str:
        return f"g{self._groups[claim.group]}"

    def of_failure(self, claim: Claim, engine: str) -> str:
        return f"f{self._claims[claim.id]}-{self._engines[engine]}"

    def of_deviation(self, engine: str, reason: str) -> str:
        return f"d{self._deviations[engine, reason]}"
