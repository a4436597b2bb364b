"""Processes that tests start: forks of the server, which find what a new interpreter would."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suites.selftest.project import Run

PROJECT = "spawn/processes"
OPTIONS = ("--ranks-adopt=spawn", "--ranks-adopt-report")
INI = "ranks_preload =\nranks_adopt_spawn = processes"


def test_they_find_what_new_interpreters_would(run: Run) -> None:
    """Each test of the project is a claim about what a process finds, and what its parent sees of it."""
    assert {name: run.outcome(name) for name in run.cases if run.outcome(name) != "passed"} == {
        "test_fails": "failure"
    }
    assert len(run.cases) == 17


def test_a_failure_names_the_rank_with_rewritten_asserts(run: Run) -> None:
    text = run.failure("test_fails")
    assert text.startswith("rank 1 of 2 failed\nrank 0: was in test_processes.py:")
    assert "E           assert [1, 2] == [1, 3]\n" in text
    assert "ProcessRaisedException: -- Process 1 terminated with the following error:" in text


def test_new_interpreters_are_counted_with_the_reason(run: Run) -> None:
    why = "PYTHONHASHSEED was changed, which a new interpreter reads as it starts"
    assert f"2 processes in new interpreters: {why}" in run.lines
