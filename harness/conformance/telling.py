"""Words that the page and the Markdown share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sized

from harness.conformance.outcome import Outcome, Point
from harness.conformance.table import Cell, Claim, Run, Table

MARKS = {
    Outcome.BROKEN: "✗",
    Outcome.MENDED: "!",
    Outcome.DEVIATION: "≈",
    Outcome.HELD: "✓",
    Outcome.NOT_OFFERED: "-",
    Outcome.SKIPPED: "○",
    Outcome.NOT_RUN: "·",
}

MEANINGS = {
    Outcome.HELD: "the engine holds the claim, at so many of the points it was asked",
    Outcome.BROKEN: "it does not, and nobody expected that",
    Outcome.DEVIATION: "it does not, and that is known, with the reason",
    Outcome.MENDED: "it holds what it was known not to hold: the list of known deviations is to be changed",
    Outcome.NOT_OFFERED: "the claim is about something that the engine does not have",
    Outcome.SKIPPED: "this machine cannot ask it, a missing GPU say",
    Outcome.NOT_RUN: "the run ended before, or another run was about it",
}

_ISSUE = re.compile(r"https?://[^\s<>\"')]+|\bpytorch(?:/pytorch)?#(\d+)")


def in_words(table: Table, claim: Claim, engine: str) -> str:
    """Return a cell's state with its points, without the mark: "24/24", "broken 20/24", "not run"."""
    cell = table.cell(claim, engine)
    match cell.outcome:
        case Outcome.NOT_RUN:
            return cell.outcome.value
        case Outcome.NOT_OFFERED | Outcome.SKIPPED:
            return f"{cell.outcome.value}: {'; '.join(reasons(cell, cell.outcome))}"
        case outcome:
            counted = f"{cell.held}/{table.asked(claim, engine)}"
            return " ".join([*_WORDS.get(outcome, ()), counted, *_apart(cell)])


_WORDS = {Outcome.BROKEN: ["broken"], Outcome.MENDED: ["mended"], Outcome.DEVIATION: ["deviates"]}


def _apart(cell: Cell) -> list[str]:
    """Say how many points of a claim that was asked were not."""
    told = [Outcome.NOT_OFFERED, Outcome.SKIPPED]
    return [f"({number} {outcome.value})" for outcome in told if (number := len(cell.having(outcome)))]


def reasons(cell: Cell, outcome: Outcome) -> list[str]:
    """Return the reasons that the cell's points of this outcome give, each once."""
    return list(dict.fromkeys(point.reason for point in cell.having(outcome) if point.reason))


def in_brief(point: Point) -> str:
    """Return the one line of a failure that tells most: pytest's first line of the error."""
    lines = [line for line in point.text.splitlines() if line.strip()]
    errors = (line.removeprefix("E").strip() for line in lines if line.startswith("E  "))
    return next(errors, lines[0] if lines else "")


def of_offered(table: Table, engine: str, claims: list[Claim]) -> str:
    """Return how much the engine holds of the points that are about something it offers."""
    share = table.share_of_offered(engine, claims)
    return f"{share.percent} % of the {share.asked} it offers" if share.asked else "offers none of it"


def counted(table: Table, engine: str, claims: list[Claim]) -> list[tuple[Outcome, int]]:
    """Return how many of these claims have each outcome, where any has."""
    found = Counter(table.cell(claim, engine).outcome for claim in claims)
    return [(outcome, found[outcome]) for outcome in MEANINGS if found[outcome]]


def number_of(claims: Sized) -> str:
    """Return "1 claim", "2 claims"."""
    return f"{len(claims)} claim{'s' if len(claims) != 1 else ''}"


def of_run(run: Run) -> str:
    """Return a sentence on one run."""
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    ended = "ran to its end" if run.ended == "complete" else f"did not run to its end ({run.ended})"
    return f"{run.when}, {run.seconds:g} s, {versions}: pytest {' '.join(run.arguments)}: {ended}."


def left_out(table: Table) -> list[str]:
    """Return the claims that the arguments of a run left out, and no other run was about."""
    claims = (claim for run in table.runs for claim in run.deselected)
    return [claim for claim in dict.fromkeys(claims) if claim not in table.claims]


def known_deviations(table: Table) -> dict[tuple[str, str], list[Claim]]:
    """Return the claims that each engine is known not to hold, by engine and reason."""
    found: dict[tuple[str, str], list[Claim]] = {}
    for claim in table.claims.values():
        for engine in table.engines:
            for reason in reasons(table.cell(claim, engine), Outcome.DEVIATION):
                found.setdefault((engine, reason), []).append(claim)
    return found


def with_links(text: str, escape: Callable[[str], str], link: Callable[[str, str], str]) -> str:
    """Escape a reason, and make links of the issues and addresses that it names."""
    parts, end = [], 0
    for found in _ISSUE.finditer(text):
        address = f"https://github.com/pytorch/pytorch/issues/{found[1]}" if found[1] else found[0]
        parts += [escape(text[end : found.start()]), link(address, found[0])]
        end = found.end()
    return "".join([*parts, escape(text[end:])])
