"""Plain calls of spawn: they run on warm ranks, with the verdicts of torch and the reports of ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from lockstep.features.spawn.process_state import differing_variable

if TYPE_CHECKING:
    from suites.selftest.project import Run

PROJECT = "spawn/worlds"
OPTIONS = ("--ranks-adopt=spawn", "--ranks-adopt-report", "-rA")
FAILED = tuple(f"test_fails[{how}]" for how in ("raises", "exits", "dies", "returns"))


def test_only_tests_fail_of_which_a_rank_fails(run: Run) -> None:
    assert {name for name in run.cases if run.outcome(name) != "passed"} == {*FAILED}
    assert len(run.cases) == 21


def test_ranks_are_the_same_from_call_to_call(run: Run) -> None:
    shown = [line for line in run.lines if line.startswith("rank 0 is process")]
    assert len(shown) >= 4
    assert len(set(shown[:4])) == 1


def test_an_exception_is_reported_as_of_a_rank(run: Run) -> None:
    text = run.failure("test_fails[raises]")
    assert text.startswith("rank 1 of 2 failed\nrank 0: lost its connection to rank 1 at test_worlds.py:")
    assert re.search(r"E +AssertionError: of rank 1\nE +assert \[1, 2\] == \[1, 3\]\n", text)
    assert "ProcessRaisedException: -- Process 1 terminated with the following error:" in text


@pytest.mark.parametrize(
    ("how", "head"),
    [
        ("exits", "rank 1 of 2 failed\n"),
        ("dies", "rank 1 of 2 died: SIGKILL\n"),
        ("returns", "rank 0 waits in all_reduce #1 (float [1]), which rank 1 never reached: it has ended"),
    ],
)
def test_the_cause_comes_first(run: Run, how: str, head: str) -> None:
    assert run.failure(f"test_fails[{how}]").startswith(head)


def test_state_is_restored_and_reported(run: Run) -> None:
    assert "the test left behind default dtype: torch.float64 (was torch.float32)" in run.output
    assert "(sleep 1000), which was ended" in run.output


@pytest.mark.parametrize(
    "line",
    [
        "1 call of spawn not on warm ranks: an argument is shared: a Tensor",
        "1 call of spawn not on warm ranks: processes of its own are asked for",
        "1 call of spawn not on warm ranks: the test has to do with the processes itself",
        "1 call of spawn not on warm ranks: the test reads what processes print (capfd)",
        "19 calls of spawn on warm ranks",
        "8 processes from the server",
    ],
)
def test_the_report_says_what_ran_where(run: Run, line: str) -> None:
    assert line in run.lines


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("PYTHONHASHSEED", "PYTHONHASHSEED"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        ("TORCHINDUCTOR_CACHE_DIR", ""),
        ("MASTER_PORT", ""),
    ],
)
def test_a_variable_that_is_read_early_is_found(name: str, found: str) -> None:
    assert differing_variable({name: "1"}, {}) == found
