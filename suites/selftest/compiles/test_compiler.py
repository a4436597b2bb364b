"""Tests of inductor without a C++ compiler are skipped, and nothing else is."""

from __future__ import annotations

import pytest

from suites.selftest.project import Run, line_of

PROJECT = "compiles"
OPTIONS = ("test_compiler.py", "-v", "-p", "no:cacheprovider")

SENTENCE = (
    "inductor needs a C++ compiler, and there is no /nowhere/c++: apt-get install g++, or set CXX to another"
)


@pytest.mark.parametrize("name", ["test_default_backend", "test_in_a_fixture"])
def test_a_test_of_inductor_is_skipped_with_what_to_install(run: Run, name: str) -> None:
    assert run.outcome(name) == f"skipped: {SENTENCE}"


def test_the_skip_is_at_the_line_that_compiles(run: Run) -> None:
    line = line_of("return torch.compile(", run.path / "test_compiler.py")
    assert f"SKIPPED [2] test_compiler.py:{line}: {SENTENCE}" in run.output


def test_a_case_of_inductor_alone_is_skipped(run: Run) -> None:
    line = line_of("backend=backend)(torch.ones(4))", run.path / "test_compiler.py")
    assert "test_compiler.py::test_cases SUBSKIPPED[backend=inductor] (inductor" in run.output
    assert f"[1] test_compiler.py:{line}: {SENTENCE}" in run.output
    assert "test_compiler.py::test_cases PASSED" in run.output


def test_the_next_test_runs(run: Run) -> None:
    assert run.outcome("test_after") == run.outcome("test_not_needed") == "passed"


def test_a_skip_of_one_rank_is_a_failure(run: Run) -> None:
    assert f"rank 1 of 2 skipped ({SENTENCE}) and others did not" in run.failure("test_one_rank")


def test_a_failure_of_the_test_itself_stays_one(run: Run) -> None:
    assert "assert 2 == 3" in run.failure("test_wrong")
