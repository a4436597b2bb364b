"""Files that change during a run, and names, values and output that are no UTF-8. In one session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import HEADER

if TYPE_CHECKING:
    from suites.selftest.project import Project


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    shared_project.copy("files")
    odd_name = os.fsdecode(b"test_\xff.py")
    tests = f"{HEADER}def test_named(world): assert world.rank == 0"
    (shared_project.path / odd_name).write_text(tests)
    environ = {"ODD": os.fsdecode(b"\xff\xfe"), "HUGE": "x" * 100_000, "REMOVED_BY_CONFTEST": "1"}
    return shared_project.run("-rA", environ=environ)


def outcomes(output: str, file: str) -> dict[str, str]:
    """Read from pytest's summary the outcome of each test of a file."""
    summary = [line.split(" - ")[0].split(" ", 1) for line in output.splitlines() if f" {file}::" in line]
    return {words[1].split("::", 1)[1]: words[0] for words in summary if words[0].isupper()}


def test_changes_since_the_collection_are_reported(output: str) -> None:
    assert outcomes(output, "test_a.py") == {"test_edits": "PASSED"}
    assert outcomes(output, "test_gone.py") == {"test_gone": "ERROR", "test_stays": "PASSED"}
    assert outcomes(output, "test_parameters.py") == {"test_p[1]": "PASSED", "test_p[2]": "ERROR"}
    for nodeid in ("test_gone.py::test_gone", "test_parameters.py::test_p[2]"):
        assert f"did not find {nodeid} in it" in output
    assert "Or has the file changed since pytest collected it?" in output
    for file in ("test_syntax.py", "test_removed.py", "zone/test_zone.py"):
        assert outcomes(output, file) == {"test_a": "ERROR"}
    assert "SyntaxError: expected ':'" in output
    assert "/test_removed.py" in output.split("file or directory not found: ", 1)[1].split("\n")[0]
    assert "No module named 'nowhere_to_be_found'" in output
    assert outcomes(output, "test_new.py") == {"test_a": "FAILED"}
    assert "AssertionError: assert 'new' == <world of 2, gloo, cpu>" in output


def test_odd_bytes_and_huge_values_reach_ranks_and_come_back(output: str) -> None:
    found = outcomes(output, "test_no_utf8.py")
    assert [found.pop(name) for name in ("test_output", "test_last_words")] == ["FAILED", "FAILED"]
    assert list(found.values()) == ["PASSED"] * 4
    assert outcomes(output, "test_\\xff.py") == {"test_named": "FAILED"}
    assert "E       AssertionError: odd \\xff text" in output
    assert "bytes \N{REPLACEMENT CHARACTER}" in output
    assert "rank 1 of 2 exited with code 3" in output


def test_a_directory_of_ranks_that_a_test_removes_is_made_again(output: str) -> None:
    assert "ERROR zz_last/test_cleans.py::test_cleans - the directory of 2 ranks" in output
    assert "FAILED zz_last/test_cleans.py::test_cleans_and_fails - rank 1: assert 1 == 0" in output
    found = outcomes(output, "zz_last/test_cleans.py")
    assert [found[name] for name in ("test_b", "test_d")] == ["PASSED", "PASSED"]


def test_nothing_is_left(output: str, shared_project: Project) -> None:
    assert "= 5 failed, 10 passed, 6 errors in" in output
    shared_project.assert_nothing_is_left()
