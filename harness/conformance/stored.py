"""The table in files: written as JSON, Markdown and a page, read as JSON, merged. Without torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.conformance.render import to_markdown, to_page
from lockstep.conformance.shape import check_shape
from lockstep.conformance.table import Case, Cell, Claim, Outcome, SuiteRun, Table
from lockstep.output import write_texts

FORMAT = 1


class NoTable(ValueError):
    """A file that holds no table of this format."""


def write(table: Table, directory: Path) -> None:
    """Write conformance.json, .md and .html; those of an earlier run are replaced.

    Raises:
        OSError: they cannot be written; none of them is, then.
    """
    texts = {"json": dump(table), "md": to_markdown(table), "html": to_page(table)}
    directory.mkdir(parents=True, exist_ok=True)
    write_texts({directory / f"conformance.{suffix}": text for suffix, text in texts.items()})


def dump(table: Table) -> str:
    """Return the table as JSON."""
    claims = [
        {
            "id": claim.id,
            "title": claim.title,
            "engines": {engine: _to_dict(cell) for engine, cell in table.cells.get(claim.id, {}).items()},
        }
        for claim in table.claims.values()
    ]
    head = {
        "format": FORMAT,
        "engines": table.engines,
        "runs": [dataclasses.asdict(run) for run in table.runs],
        "warnings": table.warnings,
    }
    # A line for each claim: two reports can be compared by diff.
    lines = ",\n".join(json.dumps(claim) for claim in claims)
    return f'{json.dumps(head)[:-1]}, "claims": [\n{lines}\n]}}\n'


def _to_dict(cell: Cell) -> dict[str, Any]:
    cases = [
        {name: value for name, value in dataclasses.asdict(case).items() if value or name == "name"}
        for case in cell.cases
    ]
    return {"outcome": cell.outcome, "seconds": cell.seconds, "cases": cases}


def load(path: Path) -> Table:
    """Read a table.

    Raises:
        NoTable: the file cannot be read, or is no table of this format; the message names it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise NoTable(f"{path}: format {content['format']!r:.40}, this version reads {FORMAT}")
        check_shape(content)
    except NoTable:
        raise
    except RecursionError:
        raise NoTable(f"{path} is no conformance.json: its brackets are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise NoTable(f"{path} is no conformance.json: {type(error).__name__}: {error}") from None
    return _to_table(content)


def _to_table(content: dict[str, Any]) -> Table:
    table = Table(list(content["engines"]), warnings=content.get("warnings", {}))
    for claim in content["claims"]:
        table.claims[claim["id"]] = Claim(claim["id"], claim["title"])
        cells = table.cells[claim["id"]] = {}
        for engine, cell in claim["engines"].items():
            cases = tuple(Case(**case | {"outcome": Outcome(case["outcome"])}) for case in cell["cases"])
            cells[engine] = Cell(cases, cell["seconds"])
    table.runs = [
        SuiteRun(**run | {"arguments": tuple(run["arguments"]), "deselected": tuple(run["deselected"])})
        for run in content["runs"]
    ]
    return table


def merge(tables: Sequence[Table]) -> Table:
    """Merge tables. Where several hold the same claim of the same engine, the last one counts.

    Of a warning the largest number of tests counts: its tests in one table may be run again in another.
    Where tables are of several torch versions, engines have it in their names: "torch-fsdp2 2.13".
    """
    tables = _apart_by_torch(tables)
    merged = Table(list(dict.fromkeys(engine for table in tables for engine in table.engines)))
    for table in tables:
        for claim in table.claims.values():
            known = merged.claims.get(claim.id)
            merged.claims[claim.id] = known if known and known.title else claim
            merged.cells.setdefault(claim.id, {}).update(table.cells.get(claim.id, {}))
        merged.runs += table.runs
        for engine, found in table.warnings.items():
            of_engine = merged.warnings.setdefault(engine, {})
            for text, number in found.items():
                of_engine[text] = max(number, of_engine.get(text, 0))
    return merged


def _apart_by_torch(tables: Sequence[Table]) -> list[Table]:
    """Return the tables, with the version of torch behind the names of engines where there are several.

    A table of several versions was merged before, and stays as it is.
    """
    of_tables = [sorted({run.versions.get("torch", "") for run in table.runs}) for table in tables]
    versions = {of_table[0] for of_table in of_tables if len(of_table) == 1}
    if len(set().union(*of_tables)) < 2:
        return [*tables]
    short = {version: ".".join(version.split(".")[:2]) for version in versions}
    if len(set(short.values())) < len(versions):
        short = {version: version for version in versions}
    return [
        _renamed(table, f" {short[of_table[0]]}") if len(of_table) == 1 else table
        for table, of_table in zip(tables, of_tables, strict=True)
    ]


def _renamed(table: Table, ending: str) -> Table:
    return dataclasses.replace(
        table,
        engines=[engine + ending for engine in table.engines],
        cells={
            claim: {engine + ending: cell for engine, cell in cells.items()}
            for claim, cells in table.cells.items()
        },
        warnings={engine + ending: found for engine, found in table.warnings.items()},
    )
