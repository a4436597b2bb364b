"""Edits of the other files, after they were collected."""

import pathlib

HEADER = "import pytest\npytestmark = pytest.mark.ranks(2)\n"


def edit(name, text):
    pathlib.Path(f"test_{name}.py").write_text(HEADER + text)


def test_edits():
    edit("gone", "def test_stays(world): pass")
    edit("parameters", "@pytest.mark.parametrize('x', [1, 3])\ndef test_p(world, x): pass")
    edit("syntax", "def test_a(world) pass")
    edit("new", "def test_a(world): assert 'new' == world")
    pathlib.Path("test_removed.py").unlink()
    pathlib.Path("zone/conftest.py").write_text("import nowhere_to_be_found")
