"""The pages as a reader follows them: files are written, commands run, and print what the page shows.

In a page a block with a title is a file, a diff with a title changes one, and a block `console` is a session:
commands behind `$ `, and below each what it prints, where a line `...` stands for any lines. Tests in other
blocks pass.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from suites.selftest.project import Project, printed_by

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"), key=str)]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
WITH_SESSIONS = [page for page in PAGES if "\n```console\n" in page.read_text()]


def python_of(page: Path) -> str:
    """Return the Python of a page that is not in a file of its own."""
    return "\n".join(
        body for kind, title, body in BLOCK.findall(page.read_text()) if (kind, title) == ("python", "")
    )


def changed(text: str, diff: str) -> str:
    """Return a text after a diff of one place, whose old lines occur once."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
    assert text.count(old) == 1, f"the diff does not fit:\n{diff}"
    return text.replace(old, new)


def comparable(text: str) -> list[str]:
    """Return the lines of an output without what differs from run to run.

    These are times, which rank failed first, and how gloo words that a connection has ended.
    """
    text = re.sub(r"\b\d+(\.\d+)? ?s\b", "N s", text)
    text = re.sub(r"(this is rank )\d+", r"\1N", text)
    text = re.sub(r"Connection (closed|reset) by peer", "Connection closed by peer", text)
    return [re.sub(r"={2,}", "==", line.rstrip()) for line in text.splitlines()]


def position(lines: list[str], part: list[str]) -> int:
    """Return behind which line the first occurrence of consecutive lines ends."""
    for end in range(len(part), len(lines) + 1):
        if lines[end - len(part) : end] == part:
            return end
    raise AssertionError("\n".join(["not printed:", *part, "", "printed:", *lines]))


def assert_shows(output: str, shown: str) -> None:
    """Assert that the parts of what a page shows occur in an output, in order."""
    lines, parts = comparable(output), comparable(shown)
    while parts:
        end = parts.index("...") if "..." in parts else len(parts)
        lines = lines[position(lines, parts[:end]) :]
        parts = parts[end + 1 :]


def run(path: Path, command: str) -> str:
    """Run a command of a page in a directory; return what it printed."""
    program = shlex.split(command.removeprefix("python -m "))
    assert program[0] in ("pytest", "lockstep")
    return printed_by(path, *program)


@pytest.mark.parametrize("page", WITH_SESSIONS, ids=lambda page: page.stem)
def test_the_sessions_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for kind, title, body in BLOCK.findall(page.read_text()):
        file = tmp_path / title
        if title:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(changed(file.read_text(), body) if kind == "diff" else body)
        elif kind == "console":
            for step in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, shown = step.partition("\n")
                assert_shows(run(tmp_path, command), shown)


def test_the_tests_of_all_pages_pass(project: Project) -> None:
    with_tests = [page for page in PAGES if "def test_" in python_of(page)]
    assert len(with_tests) > 3
    for page in with_tests:
        (project.path / f"test_{page.stem}.py").write_text(python_of(page))
    project.plugins = True
    project.write_ini("ranks_preload = lockstep.engine")
    output = project.run("-q", "-p", "lockstep.conformance.plugin")
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output


def test_a_session_that_prints_something_else_is_found() -> None:
    assert_shows("a\nb in 1.2s\nc\nd\n", "a\nb in 0.01 s\n...\nd")
    with pytest.raises(AssertionError, match="not printed:\nd\nc"):
        assert_shows("a\nb\nc\nd\n", "a\n...\nd\nc\n")
    with pytest.raises(AssertionError, match="does not fit"):
        changed("a\nb\n", " a\n-c\n+d\n")
    assert changed("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
