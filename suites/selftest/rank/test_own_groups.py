"""Worlds without a default group: `ranks(2, group=False)`, for code that makes its own."""

from __future__ import annotations

import pytest

from suites.selftest.project import Run

PROJECT = "own_groups"
MISSING = tuple(f"test_missing[{method}]" for method in ("None", "file", "tcp"))
BAD = (*MISSING, "test_hang", "test_mismatch", "test_death", "test_failure", "test_ended_early")


def test_groups_of_tests_work_and_end_with_them(run: Run) -> None:
    assert {name: run.outcome(name) for name in run.cases if name not in BAD} == dict.fromkeys(
        [
            "test_environment",
            *(f"test_left_group[{how}-{attempt}]" for how in ("None", "env://", "tcp") for attempt in (0, 1)),
            "test_destroyed_group",
            "test_first",
            "test_second",
            "test_after_the_fixture",
            "test_without_group",
            "test_caught",
            "test_end",
        ],
        "passed",
    )


def test_what_they_leave_is_no_warning(run: Run) -> None:
    assert "Warning" not in run.output


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("test_hang", "rank 0 waits in barrier #1, which rank 1 never reached: it has ended the test"),
        *(
            (name, "rank 0 waits in init_process_group, which rank 1 never reached: it has ended the test")
            for name in MISSING
        ),
        ("test_mismatch", "mismatch: rank "),
        ("test_death", "rank 1 of 2 died: SIGKILL"),
        ("test_failure", "rank 1 of 2 failed\nrank 0: lost its connection to rank 1 at "),
        ("test_ended_early", "rank 0 ended a process group to which rank 1 was still connecting: "),
    ],
)
def test_faults_are_reported_as_in_other_worlds(run: Run, name: str, verdict: str) -> None:
    assert run.failure(name).startswith(verdict)
