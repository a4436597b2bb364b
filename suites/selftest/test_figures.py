"""Figures on pages are what benchmarks have written, none is typed in by hand: `benchmarks/publish.py`."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")))

NOT_AGAIN_YET = "takes minutes to half an hour, not run again yet"
NOT_AGAIN = "of runs on earlier engines, each of half an hour"
# Tables and sentences with figures by hand, by page and first words: none is added, what is published goes.
BY_HAND = {
    (
        "reference/adopt_others.md",
        "| tests | adopted |",
    ): "needs checkouts of six projects, not run again yet",
    ("reference/claims.md", "| mutants | seconds for each |"): NOT_AGAIN,
    ("reference/claims.md", "A seed chooses other mutants"): NOT_AGAIN,
    ("reference/claims.md", "| verdict | as printed |"): NOT_AGAIN_YET,
    ("reference/claims.md", "| room | killed |"): NOT_AGAIN_YET,
}

CODE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
BENCHMARK = re.compile(r"`python\s+benchmarks/")
UNIT = r"(?:\s?(?:s|ms|us|µs|min|KiB|MiB|GiB|MB|%)(?!\w))"
# A cell that is a number, or several ("0.49, 0.48", "5,590 to 4.5"), with or without its unit.
FIGURE = re.compile(rf"[~*]*\d[\d.,]*{UNIT}?(?:(?: ?[/,] ?| to | of )\d[\d.,]*{UNIT}?)*\**")
# In a sentence: what has a unit, or a decimal point and is no version.
QUANTITY = re.compile(rf"(?<![\w.#])(?<!torch )(?<!Python )(\d[\d,]*\.\d+|\d[\d,]*(?={UNIT}))(?![\d.]*\.\d)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MARK = "\0"
"""What takes the place of a block, in a page without its blocks."""


def publish(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module("publish")


def sections(text: str) -> Iterator[list[str]]:
    """Yield the paragraphs, tables and list items of each section of a page, without its code."""
    for section in re.split(r"^#+ .*$", CODE.sub("", text), flags=re.MULTILINE):
        yield [part for part in re.split(r"\n\s*\n|\n(?=\s*\* )", section.strip("\n")) if part.strip()]


def by_hand(text: str, block: re.Pattern[str]) -> list[str]:
    """Return tables and sentences with figures that no block of the page has, where it names a benchmark.

    A table counts in a section that names one or has a block, a sentence in a paragraph that does so or that
    follows a block.
    """
    published = set(NUMBER.findall(" ".join(found[0] for found in block.finditer(text))))
    found = []
    for parts in sections(block.sub(MARK, text)):
        if not any(BENCHMARK.search(part) or MARK in part for part in parts):
            continue
        for before, part in zip(["", *parts], parts, strict=False):
            if part.startswith("|"):
                if has_figures(part):
                    found.append(part)
            elif BENCHMARK.search(part) or MARK in before:
                found += [] if quantities(part) <= published else [part]
    return found


def has_figures(table: str) -> bool:
    """Return whether a cell is a figure; a table of benchmarks has none of theirs."""
    cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", table))
    return not BENCHMARK.search(table) and any(FIGURE.fullmatch(cell) for cell in cells)


def quantities(sentence: str) -> set[str]:
    return set(QUANTITY.findall(re.sub(r"`[^`]*`", "", sentence)))


def test_every_block_is_what_its_figures_give(monkeypatch: pytest.MonkeyPatch) -> None:
    module = publish(monkeypatch)
    assert len(list(module.blocks(PROJECT))) >= 1
    assert [(block.page.name, block.name) for block in module.differing(PROJECT)] == []


def test_all_figures_that_are_kept_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    module = publish(monkeypatch)
    shown = {block.name for block in module.blocks(PROJECT)}
    assert {path.stem for path in (PROJECT / module.KEPT).iterdir()} == shown
    assert shown <= set(module.FIGURES)


def test_no_page_has_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    block = publish(monkeypatch).BLOCK
    found = [
        (str(page.relative_to(PROJECT)).removeprefix("docs/"), part)
        for page in PAGES
        for part in by_hand(page.read_text(), block)
    ]
    used = {key for key in BY_HAND for page, part in found if key[0] == page and part.startswith(key[1])}
    assert set(BY_HAND) - used == set()  # published by now: take it off the list
    excepted = [each for each in found for key in BY_HAND if each[0] == key[0] and each[1].startswith(key[1])]
    assert [each for each in found if each not in excepted] == []


PAGE = """# A page

How long it takes (`python benchmarks/sample.py`):

<!-- figures: sample (fast) -->
<!-- end of figures -->

One takes 1.5 ms.
"""
FIGURES = {
    "command": "python benchmarks/sample.py",
    "date": "2026-11-26",
    "machine": {"python": "3.11", "torch": "2.13", "cores": 2, "load": 1, "commit": "55d199"},
    "tables": {
        "fast": {"header": ["what", "time"], "rows": [["one", "1.5 ms"]], "note": "Medians."},
        "slow": {"header": ["what"], "rows": [], "note": ""},
    },
    "samples": [0.0015],
}
PUBLISHED = """<!-- figures: sample (fast) -->

| what | time |
| --- | --- |
| one | 1.5 ms |

Medians.

`python benchmarks/sample.py`, 2026-11-26, commit 55d199: Python 3.11, torch 2.13, 2 cores, load before it 1.

<!-- end of figures -->
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one page without figures, and what a benchmark wrote."""
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "sample.json").write_text(json.dumps(FIGURES))
    return tmp_path


def test_a_block_is_rewritten_and_kept_without_what_no_page_shows(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = publish(monkeypatch)
    module.publish(project, "sample", project / "sample.json")
    before, _, after = PAGE.partition("<!-- figures: sample (fast) -->\n<!-- end of figures -->\n")
    assert (project / "README.md").read_text() == f"{before}{PUBLISHED}{after}"
    kept = json.loads((project / module.KEPT / "sample.json").read_text())
    assert list(kept) == ["command", "date", "machine", "tables"]
    assert list(kept["tables"]) == ["fast"]
    assert module.differing(project) == []


def test_a_block_that_was_edited_differs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = publish(monkeypatch)
    module.publish(project, "sample", project / "sample.json")
    page = project / "README.md"
    page.write_text(page.read_text().replace("| 1.5 ms |", "| 1.4 ms |"))
    assert [block.name for block in module.differing(project)] == ["sample"]


def test_figures_name_the_commit_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    commit = importlib.import_module("figures").commit
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path)]
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("engine.py", "README.md"):
        (tmp_path / name).write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Add an engine"]):
        subprocess.run([*git, *words], check=True)
    of_head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)[:8]
    (tmp_path / "README.md").write_text("Published.")
    assert commit(tmp_path) == of_head
    (tmp_path / "new.py").write_text("pass")
    assert commit(tmp_path) == f"{of_head} and changes"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Takes 3 s (`python benchmarks/a.py`).", ["Takes 3 s (`python benchmarks/a.py`)."]),
        ("Times (`python benchmarks/a.py`):\n\n| a |\n|---|\n| 3 ms |", ["| a |\n|---|\n| 3 ms |"]),
        ("* `python\n  benchmarks/a.py`: 1.2 times", ["* `python\n  benchmarks/a.py`: 1.2 times"]),
        (f"{PUBLISHED}\nOne takes 1.5 ms.", []),
        (f"{PUBLISHED}\nOne takes 1.4 ms.", ["One takes 1.4 ms."]),
        (f"{PUBLISHED}\n| 0.9, 0.8 |\n|---|\n| 0.7 |", ["| 0.9, 0.8 |\n|---|\n| 0.7 |"]),
        ("Of torch 2.13 (`python benchmarks/a.py`).\n\nA deadline of 3 s.\n\n| a |\n|---|\n| b 3 s |", []),
        ("| `python benchmarks/a.py` | 4 |", []),
        ("Takes 3 s.\n\n# Next\n\n`python benchmarks/a.py`", []),
    ],
)
def test_figures_by_hand_are_found(text: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_hand(text, publish(monkeypatch).BLOCK) == found
