"""The page's large table: claims x engines."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from harness.conformance.anchors import Anchors
from harness.conformance.outcome import Outcome
from harness.conformance.table import Claim, Table
from harness.conformance.telling import MARKS, MEANINGS, in_words, reasons, with_links

_CLASSES = {
    Outcome.BROKEN: "b",
    Outcome.MENDED: "m",
    Outcome.DEVIATION: "d",
    Outcome.HELD: "h",
    Outcome.NOT_OFFERED: "o",
    Outcome.SKIPPED: "s",
    Outcome.NOT_RUN: "n",
}
"""One letter each: there are thousands of cells."""

_FILTER = """<form id="filter" hidden>
<label>Find <input id="text" type="search" placeholder="word, test, parameter" size="24"></label>
<label>Show <select id="state">
<option value="">all claims</option>
<option value="b">broken somewhere</option>
<option value="m">mended somewhere</option>
<option value="d">known deviation somewhere</option>
<option value="o">not offered somewhere</option>
<option value="n">not run somewhere</option>
<option value="x">where engines differ</option>
</select></label>
<output id="shown" aria-live="polite"></output>
</form>"""


def claims_table(table: Table, anchors: Anchors) -> Iterator[str]:
    yield '<section aria-labelledby="claims">\n<h2 id="claims">Claims</h2>\n<dl class="legend">'
    for outcome, text in MEANINGS.items():
        yield f"<div class={_CLASSES[outcome]}><dt>{MARKS[outcome]} {outcome}</dt><dd>{text}</dd></div>"
    yield f"</dl>\n{_FILTER}"
    yield '<div class="wide tall" tabindex="0" role="region" aria-labelledby="claims">'
    yield f'<table id="table" style="--engines:{len(table.engines)}">'
    yield f"<thead><tr><th scope=col>Claim</th>{heads(table)}</tr></thead>"
    for group, claims in table.by("group").items():
        yield f"<tbody id={anchors.of_group(claims[0])}>\n{_group_row(table, group, claims)}"
        for claim in claims:
            yield _claim_row(table, anchors, claim)
        yield "</tbody>"
    yield "</table>\n</div>\n</section>"


def _group_row(table: Table, group: str, claims: list[Claim]) -> str:
    cells = (table.claims_held(engine, claims) for engine in table.engines)
    told = "".join(f"<td>{share.held}/{share.asked} claims</td>" for share in cells)
    return f"<tr class=g><th scope=rowgroup>{escape(group)}</th>{told}</tr>"


def _claim_row(table: Table, anchors: Anchors, claim: Claim) -> str:
    classes = [_CLASSES[table.cell(claim, engine).outcome] for engine in table.engines]
    states = "".join(sorted({*classes, *("x" if len(set(classes)) > 1 else "")}))
    cells = "".join(_cell(table, anchors, claim, engine) for engine in table.engines)
    return f"<tr data-s={states or 'n'}>{_claim_head(claim)}{cells}</tr>"


def _claim_head(claim: Claim) -> str:
    parameters = f" <code>{escape(claim.parameters)}</code>" if claim.parameters else ""
    title = f" <small>{linked(claim.title)}</small>" if claim.title else ""
    return f'<th scope=row title="{escape(claim.id)}">{escape(claim.name)}{parameters}{title}</th>'


def _cell(table: Table, anchors: Anchors, claim: Claim, engine: str) -> str:
    cell = table.cell(claim, engine)
    text = f"{MARKS[cell.outcome]} {escape(in_words(table, claim, engine))}"
    if cell.outcome == Outcome.BROKEN:
        text = f'<a href="#{anchors.of_failure(claim, engine)}">{text}</a>'
    elif cell.outcome == Outcome.DEVIATION:
        reason = reasons(cell, Outcome.DEVIATION)[0]
        text = f'<a href="#{anchors.of_deviation(engine, reason)}">{text}</a>'
    elif cell.outcome == Outcome.MENDED:
        text = f"{text} <small>{linked('; '.join(reasons(cell, Outcome.MENDED)))}</small>"
    seconds = f" <small>{cell.seconds:.2f} s</small>" if cell.seconds else ""
    return f"<td class={_CLASSES[cell.outcome]}>{text}{seconds}</td>"


def heads(table: Table) -> str:
    """Return the heads of the engines' columns."""
    return "".join(f"<th scope=col>{escape(engine)}</th>" for engine in table.engines)


def linked(text: str) -> str:
    """Escape text, and make links of the issues that it names."""
    return with_links(text, escape, lambda to, name: f'<a href="{escape(to)}">{escape(name)}</a>')
