"""The table as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from harness.conformance.anchors import Anchors
from harness.conformance.outcome import Outcome, Point
from harness.conformance.page_claims import claims_table, heads, linked
from harness.conformance.table import Claim, Table
from harness.conformance.telling import (
    MARKS,
    counted,
    in_brief,
    known_deviations,
    left_out,
    number_of,
    of_offered,
    of_run,
)

MOST_TEXTS = 3
"""Failures of one claim on one engine whose text is shown; the others are named."""


def to_page(table: Table) -> str:
    """Return the whole report."""
    room = files("harness.conformance")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>Conformance of {escape(', '.join(table.engines))}</title>",
            f"<style>\n{room.joinpath('page.css').read_text()}</style>\n</head>\n<body>",
            *_body(table),
            f"<script>\n{room.joinpath('page.js').read_text()}</script>\n</body>\n</html>\n",
        ]
    )


def _body(table: Table) -> Iterator[str]:
    anchors = Anchors(table)
    yield "<header>\n<h1>Conformance</h1>"
    yield f"<ul>{''.join(f'<li>{escape(of_run(run))}</li>' for run in table.runs)}</ul>\n</header>\n<main>"
    yield from _shares(table, anchors)
    yield from claims_table(table, anchors)
    yield from _only(table)
    yield from _broken(table, anchors)
    yield from _deviations(table, anchors)
    yield from _not_run(table)
    yield "</main>"


# Sums


def _shares(table: Table, anchors: Anchors) -> Iterator[str]:
    yield '<section aria-labelledby="held">\n<h2 id="held">Points held</h2>'
    yield "<p>Of all points that an engine was asked, and of those about what it offers; then claims.</p>"
    yield '<div class="wide">\n<table>'
    yield f"<thead><tr><th scope=col>Suite</th>{heads(table)}</tr></thead>\n<tbody>"
    for suite, claims in table.by("suite").items():
        link = f'<a href="#{anchors.of_group(claims[0])}">{escape(suite)}</a>'
        yield f"<tr><th scope=row>{link}</th>{_share_cells(table, claims)}</tr>"
    claims = list(table.claims.values())
    yield f'<tr class="all"><th scope=row>All</th>{_share_cells(table, claims)}</tr>'
    yield "</tbody>\n</table>\n</div>\n</section>"


def _share_cells(table: Table, claims: list[Claim]) -> str:
    return "".join(_share_cell(table, engine, claims) for engine in table.engines)


def _share_cell(table: Table, engine: str, claims: list[Claim]) -> str:
    share = table.share(engine, claims)
    bar = f'<div class="bar" aria-hidden="true"><i style="width:{share.percent}%"></i></div>'
    words = [of_offered(table, engine, claims)]
    words += [f"{MARKS[outcome]} {number} {outcome}" for outcome, number in counted(table, engine, claims)]
    return (
        f"<td><b>{share.percent} %</b> <span>{share.held} of {share.asked}</span>{bar}"
        f"<small>{'<br>'.join(words)}</small></td>"
    )


# What the cells link to


def _only(table: Table) -> Iterator[str]:
    for engine in table.engines:
        if found := table.only(engine):
            yield from _listed(f"What only {engine} holds", [claim.id for claim in found])


def _not_run(table: Table) -> Iterator[str]:
    for engine in table.engines:
        if found := table.not_run(engine):
            yield from _listed(f"Not run on {engine}", [claim.id for claim in found])
    if deselected := left_out(table):
        yield from _listed("Left out by the arguments", deselected)


def _listed(title: str, claims: list[str]) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(title)}</h2>\n<details>"
    yield f"<summary>{number_of(claims)}</summary>\n<ul>"
    yield from (f"<li><code>{escape(claim)}</code></li>" for claim in claims)
    yield "</ul>\n</details>\n</section>"


def _broken(table: Table, anchors: Anchors) -> Iterator[str]:
    failures = list(_failures(table, anchors))
    if failures:
        yield '<section aria-labelledby="broken">\n<h2 id="broken">Broken</h2>'
        yield from failures
        yield "</section>"


def _failures(table: Table, anchors: Anchors) -> Iterator[str]:
    for claim in table.claims.values():
        for engine in table.engines:
            if broken := table.cell(claim, engine).having(Outcome.BROKEN):
                brief = f"<small>{escape(in_brief(broken[0]))}</small>"
                about = f"<b>{escape(engine)}</b> <code>{escape(claim.id)}</code>{brief}"
                # The anchor is inside: browsers open what they are sent into.
                yield f"<details><summary>{about}</summary>"
                yield f"<div id={anchors.of_failure(claim, engine)} tabindex=-1>"
                yield from map(_failure, broken[:MOST_TEXTS])
                yield from _unshown(broken[MOST_TEXTS:])
                yield "</div></details>"


def _failure(point: Point) -> str:
    name = f"<h3>{escape(point.name)}</h3>" if point.name else ""
    return f"{name}<pre>{escape(point.text)}</pre>"


def _unshown(points: list[Point]) -> Iterable[str]:
    if points:
        yield f"<p>Broken as well, see conformance.json: {escape('; '.join(p.name for p in points))}</p>"


def _deviations(table: Table, anchors: Anchors) -> Iterator[str]:
    known = known_deviations(table)
    if not known:
        return
    yield '<section aria-labelledby="deviations">\n<h2 id="deviations">Known deviations</h2>'
    yield '<ul class="apart">'
    for (engine, reason), claims in known.items():
        names = "".join(f"<li><code>{escape(claim.id)}</code></li>" for claim in claims)
        anchor = anchors.of_deviation(engine, reason)
        yield f"<li id={anchor} tabindex=-1><b>{escape(engine)}</b>: {linked(reason)}"
        yield f"<details><summary>{number_of(claims)}</summary><ul>{names}</ul></details></li>"
    yield "</ul>\n</section>"
