"""The table as an HTML page that needs nothing from elsewhere, and as Markdown. Controller; without torch.

The templates have the layout. Here are the words that both share, escaping, and the targets of links.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from itertools import product
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lockstep.conformance.causes import CommonFailure, causes
from lockstep.conformance.changes import changes, only_in
from lockstep.conformance.table import Claim, Outcome, SuiteRun, Table

MARKS = {
    Outcome.BROKEN: "✗",
    Outcome.MENDED: "!",
    Outcome.DEVIATION: "≈",
    Outcome.HELD: "✓",
    Outcome.NOT_OFFERED: "-",
    Outcome.SKIPPED: "○",
    Outcome.NOT_RUN: "·",
}

LETTERS = {
    Outcome.BROKEN: "b",
    Outcome.MENDED: "m",
    Outcome.DEVIATION: "d",
    Outcome.HELD: "h",
    Outcome.NOT_OFFERED: "o",
    Outcome.SKIPPED: "s",
    Outcome.NOT_RUN: "n",
}
"""Classes of the page's cells, one letter each: there are thousands."""

MEANINGS = {
    Outcome.HELD: "the engine holds the claim, in so many of its cases",
    Outcome.BROKEN: "it does not, and this was not expected",
    Outcome.DEVIATION: "it does not, and that is known, with the reason",
    Outcome.MENDED: "it holds what it was known not to hold: the list of known deviations is to be changed",
    Outcome.NOT_OFFERED: "the claim is about something that the engine does not have",
    Outcome.SKIPPED: "this machine cannot run it, for want of a GPU for example",
    Outcome.NOT_RUN: "the run ended before, or another run was about it",
}

_WORDS = {Outcome.BROKEN: ["broken"], Outcome.MENDED: ["mended"], Outcome.DEVIATION: ["deviates"]}

_ISSUE = re.compile(r"https?://[^\s<>\"')]+|\bpytorch(?:/pytorch)?#(\d+)")


def to_page(table: Table) -> str:
    """Return the whole report as HTML."""
    return _render("page.html.j2", table)


def to_markdown(table: Table) -> str:
    """Return the whole report as Markdown."""
    return _render("report.md.j2", table)


def to_changes(old: Table, new: Table) -> str:
    """Return as Markdown what changed from one table to another, by engine."""
    engines = [engine for engine in new.engines if engine in old.engines]
    return (
        _environment(html=False)
        .get_template("changes.md.j2")
        .render(
            old=old,
            new=new,
            engines=engines,
            missing=[each for each in dict.fromkeys([*old.engines, *new.engines]) if each not in engines],
            changes=changes,
            only_in=only_in,
        )
    )


def _render(template: str, table: Table) -> str:
    deviations, found = _known_deviations(table), causes(table)
    anchors = _Anchors(
        {group: f"g{number}" for number, group in enumerate(table.by("group"))},
        _anchors_of_causes(found),
        {pair: f"d{number}" for number, pair in enumerate(deviations)},
    )
    environment = _environment(html=template.endswith(".html.j2"))
    return environment.get_template(template).render(
        table=table,
        anchors=anchors,
        deviations=deviations,
        causes=found,
        left_out=_left_out(table),
        in_words=partial(_in_words, table),
        states=partial(_states, table),
        link_of=partial(_link_of, table, anchors),
        share_of_offered=partial(_share_of_offered, table),
        count_outcomes=partial(_count_outcomes, table),
    )


@cache
def _environment(html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "escaped": escape if html else _escape_markdown,
        "linked": _linked_html if html else _linked_markdown,
        "counted": _counted,
        "described": _described,
    }
    environment.globals |= {
        "MARKS": MARKS,
        "LETTERS": LETTERS,
        "MEANINGS": MEANINGS,
    }
    return environment


# The cells of the table


def _in_words(table: Table, claims: list[Claim], engine: str) -> str:
    """Return a test's outcome with its cases: "✓ 24/24", "✗ broken 20/24", "· not run"."""
    cell = table.together(claims, engine)
    match cell.outcome:
        case Outcome.NOT_RUN:
            words = [cell.outcome.value]
        case Outcome.NOT_OFFERED | Outcome.SKIPPED:
            words = [f"{cell.outcome.value}: {'; '.join(cell.reasons(cell.outcome))}"]
        case outcome:
            words = [
                *_WORDS.get(outcome, ()),
                f"{cell.held}/{sum(table.num_cases(claim, engine) for claim in claims)}",
            ]
            for other in (Outcome.NOT_OFFERED, Outcome.SKIPPED):
                if cases := cell.having(other):
                    words.append(f"({len(cases)} {other.value})")
    return " ".join([MARKS[cell.outcome], *words])


def _states(table: Table, claims: list[Claim]) -> str:
    """Return the letters by which the page's filter finds a row, x where engines differ."""
    letters: set[str] = set()
    for claim in claims:
        own = {LETTERS[table.cell(claim, engine).outcome] for engine in table.engines}
        letters |= own | ({"x"} if len(own) > 1 else set())
    return "".join(sorted(letters)) or "n"


def _share_of_offered(table: Table, engine: str, claims: list[Claim]) -> str:
    """Return how much the engine holds of the cases that are about something it offers."""
    share = table.share_of_offered(engine, claims)
    return f"{share.percent} % of the {share.total} it offers" if share.total else "offers none of it"


def _count_outcomes(table: Table, engine: str, claims: list[Claim]) -> list[tuple[Outcome, int]]:
    """Return how many of these claims have each outcome, where any has."""
    found = Counter(table.cell(claim, engine).outcome for claim in claims)
    return [(outcome, found[outcome]) for outcome in MEANINGS if found[outcome]]


# What the cells link to


@dataclass(frozen=True)
class _Anchors:
    """Ids of elements of the page."""

    groups: dict[str, str]
    causes: dict[tuple[str, str], str]
    """Anchor of the first cause, by claim's id and engine."""
    deviations: dict[tuple[str, str], str]
    """Anchor of each deviation, by engine and reason."""


def _anchors_of_causes(found: list[CommonFailure]) -> dict[tuple[str, str], str]:
    """Return anchors in `_Anchors.causes`; the first cause of a cell is that of most cases."""
    anchors: dict[tuple[str, str], str] = {}
    for number, cause in enumerate(found):
        for claim, _ in cause.broken:
            anchors.setdefault((claim.id, cause.engine), f"c{number}")
    return anchors


def _link_of(table: Table, anchors: _Anchors, claims: list[Claim], engine: str) -> str:
    """Return the anchor of the cause or deviation behind a cell; "" if the page has none."""
    cell = table.together(claims, engine)
    if cell.outcome == Outcome.BROKEN:
        return next(
            anchors.causes[claim.id, engine] for claim in claims if (claim.id, engine) in anchors.causes
        )
    if cell.outcome == Outcome.DEVIATION:
        reasons = cell.reasons(Outcome.DEVIATION)  # a mark may give none
        return anchors.deviations[engine, reasons[0]] if reasons else ""
    return ""


def _known_deviations(table: Table) -> dict[tuple[str, str], list[Claim]]:
    """Return the claims that each engine is known not to hold, by engine and reason."""
    found: dict[tuple[str, str], list[Claim]] = {}
    for claim, engine in product(table.claims.values(), table.engines):
        for reason in table.cell(claim, engine).reasons(Outcome.DEVIATION):
            found.setdefault((engine, reason), []).append(claim)
    return found


def _left_out(table: Table) -> list[str]:
    """Return the claims that the arguments of a run left out, and that no other run was about."""
    claims = (claim for run in table.runs for claim in run.deselected)
    return [claim for claim in dict.fromkeys(claims) if claim not in table.claims]


# Words and escaping


def _counted(things: Sized, noun: str = "claim") -> str:
    return f"{len(things)} {noun}{'s' if len(things) != 1 else ''}"


def _described(run: SuiteRun) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    ended = "ran to its end" if run.ended == "complete" else f"did not run to its end ({run.ended})"
    return f"{run.when}, {run.seconds:g} s, {versions}: pytest {' '.join(run.arguments)}: {ended}."


def _escape_markdown(text: str) -> str:
    """Escape what Markdown would interpret, and take out line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", re.sub(r"\s+", " ", text))


def _linked_html(text: str) -> str:
    return _linked(text, escape, lambda to, name: f'<a href="{escape(to)}">{escape(name)}</a>')


def _linked_markdown(text: str) -> str:
    return _linked(text, _escape_markdown, lambda address, name: f"[{_escape_markdown(name)}]({address})")


def _linked(text: str, escape: Callable[[str], str], link: Callable[[str, str], str]) -> str:
    """Escape a reason, and make links of the issues and addresses that it names."""
    parts, end = [], 0
    for found in _ISSUE.finditer(text):
        address = f"https://github.com/pytorch/pytorch/issues/{found[1]}" if found[1] else found[0]
        parts += [escape(text[end : found.start()]), link(address, found[0])]
        end = found.end()
    return "".join([*parts, escape(text[end:])])
