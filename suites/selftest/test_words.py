"""The words of the project: plain technical English, without the words that a reader would not search for."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

# Each with what the field says instead. Part of a longer word is no match, part of an identifier is.
RETIRED = {
    "told": "reported, given, passed",
    "tells": "says, reports",
    "telling": "reporting, formatting",
    "anew": "again",
    "amid": "among",
    "heed": "respect, follow",
    "heeds": "respects, follows",
    "heeded": "respected, followed",
    "nobody": "no rank, no one, nothing",
    "somebody": "someone, a caller",
    "whoever": "the caller, the reader",
    "cure": "remedy, fix",
    "cures": "remedies, fixes",
    "quarrel": "cause, mismatch",
    "posing": "the input of pytest-xdist",
    "belongings": "open resources",
    "befits": "fits",
    "hitherto": "so far",
    "henceforth": "from then on",
    "meanwhile": "by now, since, until then",
    "no news": "expected, hidden",
    "in vain": "without end, for nothing",
}
WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(RETIRED)})(?![A-Za-z])", re.IGNORECASE)

# A docstring says what a thing is or does; a clause without a verb says neither, nor "Do so".
CLAUSE = re.compile(r"(What|Which|Who|Whose|Whom|How|Why)\b(?!.*\?)|(Do so|Do the same|Likewise)\b")

# An attribute's docstring is a noun phrase; what is true or false begins with "True if".
HALF_SENTENCE = re.compile(
    r"(What|Which|Whose|How|Why|Where|When|Whether|That|Those|Of|As|By|In|And|Its|Likewise)\b"
)


def files(*patterns: str) -> list[Path]:
    """Return the project's own files that match, but this one, which has to name the words."""
    folders = ("benchmarks", "docs", "harness", "suites")
    found = [path for folder in folders for pattern in patterns for path in (PROJECT / folder).rglob(pattern)]
    found += [path for pattern in patterns for path in PROJECT.glob(pattern)]
    return sorted(path for path in found if path != Path(__file__))


def lines(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the line."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(PROJECT)}:{number}", line


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the docstring of each module, class and function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield f"{path.relative_to(PROJECT)}:{getattr(node, 'lineno', 1)}", text


def test_retired_words_are_not_used() -> None:
    read = files("*.py", "*.md", "*.toml", "*.ini", "*.j2")
    assert len(read) > 100
    used = {
        place: f"{word[0]} -> {RETIRED[word[0].lower()]}"
        for place, line in lines(read)
        if (word := WORD.search(line))
    }
    assert used == {}


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    found = [(place, text.splitlines()[0]) for path in files("*.py") for place, text in docstrings(path)]
    assert len(found) > 1000
    assert [f"{place}: {first}" for place, first in found if CLAUSE.match(first)] == []


BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef)


def attribute_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the text of each string behind an assignment, at any level of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        for before, after in itertools.pairwise(node.body if isinstance(node, BODIES) else ()):
            match before, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{path.relative_to(PROJECT)}:{after.lineno}", text


def test_docstrings_of_attributes_are_noun_phrases() -> None:
    paths = (PROJECT / "harness").rglob("*.py")
    found = [(place, text.splitlines()[0]) for path in paths for place, text in attribute_docstrings(path)]
    assert len(found) > 400
    assert [f"{place}: {first}" for place, first in found if HALF_SENTENCE.match(first)] == []


def test_docstrings_quote_code_in_single_back_ticks() -> None:
    assert [place for place, line in lines(files("*.py")) if "``" in line and "```" not in line] == []


@pytest.mark.parametrize("line", ["it was told so", "def tell_told(x):", "TOLD = 1", "no cure"])
def test_a_retired_word_is_found_in_prose_and_in_identifiers(line: str) -> None:
    assert WORD.search(line)


@pytest.mark.parametrize("line", ["untold", "a procedure", "secure", "retold"])
def test_a_longer_word_is_no_retired_word(line: str) -> None:
    assert not WORD.search(line)
