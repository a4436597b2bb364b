"""Files that change while a run goes on, and what is no UTF-8: names, values, output. In one session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

EDITS = """
import os, pathlib

def edit(name, text):
    pathlib.Path(f"test_{name}.py").write_text(os.environ["HEADER"] + text)

def test_edits():
    edit("gone", "def test_stays(world): pass")
    edit("parameters", "@pytest.mark.parametrize('x', [1, 3])\\ndef test_p(world, x): pass")
    edit("syntax", "def test_a(world) pass")
    edit("new", "def test_a(world): assert 'new' == world")
    pathlib.Path("test_removed.py").unlink()
    pathlib.Path("zone/conftest.py").write_text("import nowhere_to_be_found")
"""
EDITED = {
    "gone": "def test_gone(world): pass\ndef test_stays(world): pass",
    "parameters": "@pytest.mark.parametrize('x', [1, 2])\ndef test_p(world, x): pass",
    **dict.fromkeys(["syntax", "new", "removed"], "def test_a(world): pass"),
}
CONFTEST = (
    "import os\nos.environ.setdefault('SET_BY_CONFTEST', 'in the controller')\n"
    "os.environ.pop('REMOVED_BY_CONFTEST', None)\n"
)
NO_UTF8 = """
import sys

def test_environment(world):
    assert os.environb[b"ODD"] == b"\\xff\\xfe"
    assert os.environ["HUGE"] == "x" * 100_000
    assert os.environ["SET_BY_CONFTEST"] == "in the controller"
    assert "REMOVED_BY_CONFTEST" not in os.environ

def test_output(world):
    os.write(1, b"bytes \\xff\\n")
    sys.stdout.buffer.write(b"more \\xff\\n")
    assert world.rank == 0, "odd \\udcff text"

@pytest.mark.parametrize("x", ["\\udcff", "é", "a" * 5000], ids=str)
def test_ids(world, x):
    world.barrier()

def test_last_words(world):
    os.write(2, b"raw \\xff\\n")
    if world.rank == 1:
        os._exit(3)
"""
CLEANS = """
def clean(world):
    world.barrier()  # all have begun: the controller needs the directory for that
    if world.rank == 0:
        (directory,) = pathlib.Path(os.environ["TMPDIR"]).glob("pymp-*")
        directory.rename(f"cleaned-{os.getpid()}")
    world.barrier()

def test_cleans(world): clean(world)
def test_b(world): pass
def test_cleans_and_fails(world):
    clean(world)
    assert world.rank == 0
def test_d(world): pass
"""
NAMED = "def test_named(world): assert world.rank == 0"


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    project, odd_name = shared_project, os.fsdecode(b"test_\xff.py")
    project.write("")
    (project.path / "conftest.py").write_text(CONFTEST)
    (project.path / "test_a.py").write_text(EDITS)  # runs first
    tests = {f"test_{name}.py": text for name, text in EDITED.items()}
    tests |= {"zone/test_zone.py": "def test_a(world): pass"}
    tests |= {"test_no_utf8.py": NO_UTF8, odd_name: NAMED, "zz_last/test_cleans.py": CLEANS}
    (project.path / "zone").mkdir()
    (project.path / "zz_last").mkdir()  # the server is gone after that
    (project.path / "zone" / "conftest.py").touch()
    for name, text in tests.items():
        (project.path / name).write_text(project.header + text)
    environ = {"ODD": os.fsdecode(b"\xff\xfe"), "HUGE": "x" * 100_000, "REMOVED_BY_CONFTEST": "1"}
    return project.run("-rA", environ={**environ, "HEADER": project.header})


def told(output: str, file: str) -> dict[str, str]:
    """Read pytest's summary: what became of each test of a file."""
    summary = [line.split(" - ")[0].split(" ", 1) for line in output.splitlines() if f" {file}::" in line]
    return {words[1].split("::", 1)[1]: words[0] for words in summary if words[0].isupper()}


def test_what_has_changed_since_the_collection_is_told(output: str) -> None:
    assert told(output, "test_a.py") == {"test_edits": "PASSED"}
    assert told(output, "test_gone.py") == {"test_gone": "ERROR", "test_stays": "PASSED"}
    assert told(output, "test_parameters.py") == {"test_p[1]": "PASSED", "test_p[2]": "ERROR"}
    for nodeid in ("test_gone.py::test_gone", "test_parameters.py::test_p[2]"):
        assert f"did not find {nodeid} in it" in output
    assert "Or has the file changed since pytest collected it?" in output
    for file in ("test_syntax.py", "test_removed.py", "zone/test_zone.py"):
        assert told(output, file) == {"test_a": "ERROR"}
    assert "SyntaxError: expected ':'" in output
    assert "/test_removed.py" in output.split("file or directory not found: ", 1)[1].split("\n")[0]
    assert "No module named 'nowhere_to_be_found'" in output
    assert told(output, "test_new.py") == {"test_a": "FAILED"}
    assert "AssertionError: assert 'new' == <world of 2, gloo, cpu>" in output


def test_what_is_no_utf8_and_what_is_huge_reaches_ranks_and_comes_back(output: str) -> None:
    outcomes = told(output, "test_no_utf8.py")
    assert [outcomes.pop(name) for name in ("test_output", "test_last_words")] == ["FAILED", "FAILED"]
    assert list(outcomes.values()) == ["PASSED"] * 4
    assert told(output, "test_\\xff.py") == {"test_named": "FAILED"}
    assert "E       AssertionError: odd \\xff text" in output
    assert "bytes \N{REPLACEMENT CHARACTER}" in output
    assert "rank 1 of 2 exited with code 3" in output


def test_a_directory_of_ranks_that_a_test_removes_is_made_anew(output: str) -> None:
    assert "ERROR zz_last/test_cleans.py::test_cleans - the directory of 2 ranks" in output
    assert "FAILED zz_last/test_cleans.py::test_cleans_and_fails - rank 1: assert 1 == 0" in output
    outcomes = told(output, "zz_last/test_cleans.py")
    assert [outcomes[name] for name in ("test_b", "test_d")] == ["PASSED", "PASSED"]


def test_nothing_is_left(output: str, shared_project: Project) -> None:
    assert "= 5 failed, 10 passed, 6 errors in" in output
    shared_project.assert_nothing_is_left()
