"""Files that change while a run goes on, and what is no UTF-8: names, values, output."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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


def test_what_has_changed_since_the_collection_is_told(project: Project) -> None:
    project.write("")
    tests = {
        "gone": "def test_gone(world): pass\ndef test_stays(world): pass",
        "parameters": "@pytest.mark.parametrize('x', [1, 2])\ndef test_p(world, x): pass",
        **dict.fromkeys(["syntax", "new", "removed"], "def test_a(world): pass"),
    }
    for name, text in tests.items():
        (project.path / f"test_{name}.py").write_text(project.header + text)
    (project.path / "test_a.py").write_text(EDITS)
    (project.path / "zone").mkdir()
    (project.path / "zone" / "conftest.py").touch()
    (project.path / "zone" / "test_zone.py").write_text(project.header + "def test_a(world): pass")
    output = project.run(environ={"HEADER": project.header})
    for nodeid in ("test_gone.py::test_gone", "test_parameters.py::test_p[2]"):
        assert f"did not find {nodeid} in it" in output
    assert "Or has the file changed since pytest collected it?" in output
    assert "SyntaxError: expected ':'" in output
    assert f"file or directory not found: {project.path}/test_removed.py" in output
    assert "AssertionError: assert 'new' == <world of 2, gloo, cpu>" in output
    assert "No module named 'nowhere_to_be_found'" in output
    assert "1 failed, 3 passed, 5 errors" in output
    project.assert_nothing_is_left()


def test_a_directory_of_ranks_that_a_test_removes_is_made_anew(project: Project) -> None:
    project.write("""
def clean(world):
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
""")
    output = project.run()
    assert "ERROR test_sample.py::test_cleans - the directory of 2 ranks" in output
    assert "FAILED test_sample.py::test_cleans_and_fails - rank 1: assert 1 == 0" in output
    assert "1 failed, 3 passed, 1 error" in output
    project.assert_nothing_is_left()


def test_what_is_no_utf8_and_what_is_huge_reaches_ranks_and_comes_back(project: Project) -> None:
    project.write("""
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
""")
    (project.path / "conftest.py").write_text(
        "import os\nos.environ.setdefault('SET_BY_CONFTEST', 'in the controller')\n"
        "os.environ.pop('REMOVED_BY_CONFTEST', None)\n"
    )
    name = os.fsdecode(b"test_\xff.py")
    (project.path / name).write_text(project.header + "def test_named(world): assert world.rank == 0")
    environ = {"ODD": os.fsdecode(b"\xff\xfe"), "HUGE": "x" * 100_000, "REMOVED_BY_CONFTEST": "1"}
    output = project.run(environ=environ)
    assert "3 failed, 4 passed" in output
    assert "E       AssertionError: odd \\xff text" in output
    assert "bytes \N{REPLACEMENT CHARACTER}" in output
    assert "rank 1 of 2 exited with code 3" in output
    project.assert_nothing_is_left()
