"""The table as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.conformance.outcome import Outcome
from harness.conformance.table import Claim, Table
from harness.conformance.telling import (
    MARKS,
    MEANINGS,
    in_brief,
    in_words,
    known_deviations,
    left_out,
    number_of,
    of_run,
    with_links,
)


def to_markdown(table: Table) -> str:
    """Return the whole report."""
    parts = [
        "# Conformance",
        "\n".join(f"* {_escape(of_run(run))}" for run in table.runs),
        "\n".join(f"* {MARKS[outcome]} {outcome}: {text}" for outcome, text in MEANINGS.items()),
        "## Points held",
        "Held / not held, or not asked / not offered, and the share of all points that is held.",
        _rows(["suite", *table.engines], _shares(table)),
        *_only(table),
        *_broken(table),
        *_deviations(table),
        *_not_run(table),
        "## Claims",
    ]
    for group, claims in table.by("group").items():
        parts += [f"### {_escape(group)}", _rows(["claim", *table.engines], _claims(table, claims))]
    return "\n\n".join(parts) + "\n"


def _shares(table: Table) -> Iterable[list[str]]:
    for suite, claims in [*table.by("suite").items(), ("**all**", list(table.claims.values()))]:
        yield [suite, *(_share(table, engine, claims) for engine in table.engines)]


def _share(table: Table, engine: str, claims: list[Claim]) -> str:
    share, offered = table.share(engine, claims), table.share_of_offered(engine, claims)
    points = (share.held, offered.asked - share.held, share.asked - offered.asked)
    return f"{' / '.join(map(str, points))}, {share.percent} %"


def _claims(table: Table, claims: list[Claim]) -> Iterable[list[str]]:
    for claim in claims:
        cells = []
        for engine in table.engines:
            cell = table.cell(claim, engine)
            seconds = f", {cell.seconds:.2f} s" if cell.points else ""
            cells.append(_escape(f"{MARKS[cell.outcome]} {in_words(table, claim, engine)}{seconds}"))
        yield [_name(claim), *cells]


def _only(table: Table) -> Iterable[str]:
    for engine in table.engines:
        if found := table.only(engine):
            yield f"## What only {_escape(engine)} holds"
            yield _listed(found)


def _broken(table: Table) -> Iterable[str]:
    lines = []
    for claim in table.claims.values():
        for engine in table.engines:
            for point in table.cell(claim, engine).having(Outcome.BROKEN):
                where = f"{claim.id} [{point.name}]" if point.name else claim.id
                lines.append(f"* {_escape(engine)}: `{where}`: {_escape(in_brief(point))}")
    return ["## Broken", "\n".join(lines)] if lines else []


def _deviations(table: Table) -> Iterable[str]:
    lines = []
    for (engine, reason), claims in known_deviations(table).items():
        told = with_links(reason, _escape, lambda address, text: f"[{_escape(text)}]({address})")
        lines.append(f"* {_escape(engine)}: {told} ({number_of(claims)})")
    return ["## Known deviations", "\n".join(lines)] if lines else []


def _not_run(table: Table) -> Iterable[str]:
    for engine in table.engines:
        if found := table.not_run(engine):
            yield f"## Not run on {_escape(engine)}"
            yield _listed(found)
    if deselected := left_out(table):
        yield "## Left out by the arguments"
        yield "\n".join(f"* `{claim}`" for claim in deselected)


def _listed(claims: Iterable[Claim]) -> str:
    return "\n".join(f"* `{claim.id}`" for claim in claims)


def _name(claim: Claim) -> str:
    parameters = f" `{claim.parameters}`" if claim.parameters else ""
    title = f": {_escape(claim.title)}" if claim.title else ""
    return f"{_escape(claim.name)}{parameters.replace('|', chr(92) + '|')}{title}"


def _rows(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [[*head[:1], *map(_escape, head[1:])], ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Take from text what Markdown would read as its own, and line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", re.sub(r"\s+", " ", text))
