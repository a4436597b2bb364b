"""The table as JSON: written, read, and several brought together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.conformance.outcome import Outcome, Point
from harness.conformance.table import Cell, Claim, Run, Table

FORMAT = 1


class NoTable(ValueError):
    """A file that holds no table of this format."""


def dump(table: Table) -> str:
    """Return the table as JSON."""
    claims = [
        {
            "id": claim.id,
            "title": claim.title,
            "engines": {engine: _cell(cell) for engine, cell in table.cells.get(claim.id, {}).items()},
        }
        for claim in table.claims.values()
    ]
    head = {
        "format": FORMAT,
        "engines": table.engines,
        "runs": [dataclasses.asdict(run) for run in table.runs],
    }
    # A line for each claim: two reports can be compared by diff.
    lines = ",\n".join(json.dumps(claim) for claim in claims)
    return f'{json.dumps(head)[:-1]}, "claims": [\n{lines}\n]}}\n'


def _cell(cell: Cell) -> dict[str, Any]:
    points = [
        {name: value for name, value in dataclasses.asdict(point).items() if value or name == "name"}
        for point in cell.points
    ]
    return {"outcome": cell.outcome, "seconds": cell.seconds, "points": points}


def load(path: Path) -> Table:
    """Read a table.

    Raises:
        NoTable: the file cannot be read, or is no table of this format; the message names it.
    """
    try:
        told = json.loads(path.read_text())
        if told["format"] != FORMAT:
            raise NoTable(f"{path}: format {told['format']}, this version reads {FORMAT}")
        return _table(told)
    except NoTable:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoTable(f"{path} is no conformance.json: {type(error).__name__}: {error}") from None


def _table(told: dict[str, Any]) -> Table:
    table = Table(list(told["engines"]))
    for claim in told["claims"]:
        table.claims[claim["id"]] = Claim(claim["id"], claim["title"])
        table.cells[claim["id"]] = {name: _read_cell(cell) for name, cell in claim["engines"].items()}
    table.runs = [
        Run(**run | {"arguments": tuple(run["arguments"]), "deselected": tuple(run["deselected"])})
        for run in told["runs"]
    ]
    return table


def _read_cell(cell: dict[str, Any]) -> Cell:
    points = (Point(**point | {"outcome": Outcome(point["outcome"])}) for point in cell["points"])
    return Cell(tuple(points), cell["seconds"])


def merge(tables: Sequence[Table]) -> Table:
    """Bring tables together. Where several hold the same claim of the same engine, the last one counts."""
    merged = Table(list(dict.fromkeys(engine for table in tables for engine in table.engines)))
    for table in tables:
        for claim in table.claims.values():
            known = merged.claims.get(claim.id)
            merged.claims[claim.id] = known if known and known.title else claim
            merged.cells.setdefault(claim.id, {}).update(table.cells.get(claim.id, {}))
        merged.runs += table.runs
    return merged
