"""The limits of `faults.expect`: it excuses what happens inside of it, once, and nothing else."""

from __future__ import annotations

import pytest

from suites.selftest.project import Run

PROJECT = "injected"
OPTIONS = ("test_excused.py",)
INI = "filterwarnings = ignore::FutureWarning"
DEATHS = {
    "test_death_after_it": "rank 2 of 3 died: SIGKILL",
    "test_death_after_a_failure": "rank 1 of 2 died: SIGTERM",
    "test_death_before_it": "rank 1 of 3 died: SIGKILL",
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_outside_of_it_fails(run: Run, name: str) -> None:
    assert run.failure(name).startswith(DEATHS[name])


def test_a_rank_that_had_not_entered_is_named(run: Run) -> None:
    expected = 'expected by the test, and not seen: "rank 1 of 3 died"; rank 1 died outside of the block'
    text = run.failure("test_death_before_it")
    assert expected in text
    assert "no world.rebuild()" not in text


@pytest.mark.parametrize("name", ["test_nothing_in_the_second", "test_an_error_in_the_second"])
def test_a_death_that_an_earlier_block_expected_is_not_outside_of_one(run: Run, name: str) -> None:
    text = run.failure(name)
    assert "outside of the block" not in text
    assert "no world.rebuild()" not in text


def test_a_death_in_teardown_fails(run: Run) -> None:
    text = run.failure("test_death_in_teardown", "error")
    assert text.startswith("rank 2 of 3 died: SIGKILL")
    assert "rank 1: died: SIGKILL, as the test expects" in text


FAILURES = {
    "test_nothing_in_the_second": "faults.expect('died: SIGKILL'): nothing happened to any rank",
    "test_an_error_in_the_second": "my plugin for gloo timed out",
    "test_a_fault_of_the_dead": "rank 1 has died; rank= is a number of the fixture `world`, of which",
    "test_a_hang_after_a_death": "rank 2: stood still, and was ended by the harness, as the test expects",
    "test_a_bug_in_recovery": "KeyError: 'a bug in recovery'",
    "test_a_failure_after_a_failure": "AssertionError: a claim of this test",
    "test_no_rebuild_after_a_failure": "no world.rebuild() since the expected fault: groups of before",
    "test_nothing_struck": 'faults.kill(rank=1, before="all_reduce", nth=9) never struck: 1 collective has '
    "matched; since it was injected, rank 1 ran all_reduce #1 (float32[3], 2 ranks)",
}


@pytest.mark.parametrize("name", FAILURES)
def test_one_fault_excuses_nothing_else(run: Run, name: str) -> None:
    assert FAILURES[name] in run.failure(name)


def test_collectives_of_a_rebuilt_world_are_compared(run: Run) -> None:
    text = run.failure("test_a_mismatch_after_rebuild")
    assert text.startswith("mismatch: rank 0 is in all_reduce #2 (float [3]) while rank 2 is in barrier #2")
    text = run.failure("test_a_send_after_rebuild")
    assert text.startswith("rank 0 of 3 left isend to rank 2 (float32 [2]) at test_excused.py:")


def test_a_timeline_keeps_a_rebuilt_world_apart(run: Run) -> None:
    text = run.failure("test_a_mismatch_after_rebuild").split("timeline: the last collectives")[1]
    first, second, third = ("\n" + text.replace(" ", "")).split("\nrank")[1:4]
    lost, died = "all_reduce#1███████failed", "─nevercame─✗died:SIGKILL,beforeall_reduce#1"
    assert first.startswith(f"0{lost}all_reduce#2███████waits≠total()attest_excused.py:")
    assert second.startswith(f"1{died}")
    assert third.startswith(f"2{lost}barrier#2███████waits≠test_a_mismatch_after_rebuild()at")


def test_what_was_seen_is_not_called_unseen(run: Run) -> None:
    assert "not seen" not in run.failure("test_a_failure_after_a_failure")
    assert 'and not seen: "died: SIGKILL"' in run.failure("test_nothing_in_the_second")


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_claim_of_one_rank_fails_its_case_and_the_next_one_runs(run: Run, where: str) -> None:
    name = f"test_claims_of_one_rank[{where}]"
    subtests = [line for line in run.lines if f"test_excused.py::{name}" in line and "SUB" in line]
    assert len(subtests) == 1, run.output
    assert subtests[0].startswith("SUBFAILED[value=1]")
    assert " - rank 2:" in subtests[0]


def test_cases_need_a_world_without_dead_ranks(run: Run) -> None:
    assert run.failure("test_a_case_without_rebuild").startswith("rank 2 of 3 failed")
    assert "rank 1 died, as the test expects, and the world was not rebuilt: call world" in run.output
    assert "SUBFAILED[value=2] test_excused.py::test_a_case_without_rebuild" not in run.output


def test_those_left_may_skip(run: Run) -> None:
    assert run.outcome("test_skipped_by_those_left") == "skipped: no way to go on"
