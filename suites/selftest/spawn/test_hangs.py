"""Processes of tests that hang: they are ended, and the report says where each was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from lockstep.features.spawn import deadline
from lockstep.features.spawn.deadline import Deadline, Limits
from suites.selftest.project import line_of

if TYPE_CHECKING:
    from suites.selftest.project import Run

PROJECT = "spawn/hangs"
OPTIONS = ("--ranks-adopt=spawn", "--world-timeout=8")


def test_what_hangs_fails_and_the_test_after_it_passes(run: Run) -> None:
    assert {name for name in run.cases if run.outcome(name) == "passed"} == {"test_healthy"}
    assert len(run.cases) == 6
    assert "left behind" not in run.output


def place(run: Run, code: str) -> str:
    return f"test_hangs.py:{line_of(code, run.path / 'test_hangs.py')}"


def test_on_warm_ranks_the_wait_and_its_reason_come_first(run: Run) -> None:
    lines = run.failure("test_on_warm_ranks").splitlines()
    sleeps = f"at {place(run, '# for ever')} in run"
    assert (
        lines[0] == f"rank 0 waits in all_reduce #1 (float [1]), which rank 1 never reached: it is {sleeps}"
    )
    assert lines[1].startswith("rank 1 of 2 timed out after 8 s, in ")


@pytest.mark.parametrize("name", ["in_own_processes", "in_a_context"])
def test_in_other_processes_too(run: Run, name: str) -> None:
    text = run.failure(f"test_{name}")
    waits = f"all_reduce at {place(run, 'dist.all_reduce')} in run"
    sleeps = f"rank 1 is at {place(run, '# for ever')} in run"
    assert text.splitlines()[0] == f"rank 0 waits in {waits}, and {sleeps}"
    assert "rank 1 of 2 timed out after 8 s, in " in text
    assert "Failed: rank 0 waits in" in text


def test_new_interpreters_are_ended_without_stacks(run: Run) -> None:
    text = run.failure("test_in_new_interpreters")
    assert text.startswith("all 2 ranks timed out after 8 s, in code that is not the test's")


def test_a_joined_process_is_named_with_its_stack(run: Run) -> None:
    text = run.failure("test_a_process")
    assert text.count(", `wait`) has not ended within 8 s\n") == 2
    assert text.count(f"line {line_of('# of a process', run.path / 'test_hangs.py')} in wait") == 2


def test_processes_that_compute_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = computed = 0.0
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now)
    monkeypatch.setattr(deadline, "processor_time", lambda pids: computed)
    tested = Deadline(Limits(60, 300), lambda: {os.getpid()})
    found = []
    for now, computed in ((0, 0), (1, 5), (51, 25), (100, 26), (250, 100), (260, 100)):  # noqa: B007
        found.append(tested.moment())
    assert found == [60, 60, 111, 111, 300, 300]


def test_the_time_of_this_process_and_its_children_is_counted() -> None:
    before = deadline.processor_time({os.getpid()})
    while deadline.processor_time({os.getpid()}) < before + 0.05:
        sum(range(10_000))
