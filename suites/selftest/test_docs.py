"""The pages under docs: their examples run, and the tests they name exist."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = sorted((PROJECT / "docs").glob("*.md"))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

# `room/test_file.py::TestClass::test_name`, where the class may be missing.
NAMED_TEST = re.compile(r"`(\w+/test_\w+\.py)::([\w:]+)`")


def names_of_tests(path):
    """Return the names of a file's tests, those of a class behind the class's."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return names


def test_there_is_a_page():
    assert [page.stem for page in PAGES] == ["mixed_precision"]


@EVERY_PAGE
def test_every_test_that_a_page_names_exists(page):
    text, suites = page.read_text(), PROJECT / "suites"
    named = NAMED_TEST.findall(text)
    assert len(named) == text.count(".py::")
    assert [f"{file}::{name}" for file, name in named if name not in names_of_tests(suites / file)] == []


@EVERY_PAGE
@pytest.mark.ranks(1, 2, 3, backend="gloo")
def test_the_examples_of_a_page_run(world, page, monkeypatch):
    # What is freed is to be seen freed.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page.name, "exec"), {})
