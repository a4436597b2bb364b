"""`faults.expect` and `world.rebuild`: what survivors of a fault go on with, and what still fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from lockstep.features.injection.expectation import Expectation
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE, Happened
from lockstep.protocol import Agreed, Vote
from suites.selftest.project import Run

PROJECT = "injected"
OPTIONS = ("test_expected.py",)
INI = "filterwarnings = ignore::FutureWarning"
ON_EACH = pytest.mark.parametrize("backend", ["gloo", "shm"])


RIGHT = [
    *("test_kill", "test_stop", "test_hang", "test_fail", "test_without_an_error", "test_healthy"),
    *("test_two_after_each_other", "test_rebuild", "test_training", "test_training_undisturbed"),
]


@ON_EACH
@pytest.mark.parametrize("name", RIGHT)
def test_survivors_go_on_after_an_expected_fault(run: Run, name: str, backend: str) -> None:
    assert run.outcome(f"{name}[{backend}]") == "passed", run.output


@ON_EACH
def test_a_fault_on_all_ranks_that_is_expected_costs_the_next_test_nothing(run: Run, backend: str) -> None:
    assert run.outcome(f"test_all_fail[{backend}-fails]") == "passed", run.output
    assert run.outcome(f"test_all_fail[{backend}-next]") == "passed", run.output


@pytest.mark.parametrize(
    "name", ["test_collectives_without_end", "test_ddp_without_end", "test_group_that_never_ends"]
)
def test_survivors_give_up_what_never_ends(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed", run.output


def test_survivors_go_on_in_unittest(run: Run) -> None:
    assert run.outcome("test_in_unittest") == "passed", run.output


@ON_EACH
def test_another_fault_than_expected_fails_with_both_texts(run: Run, backend: str) -> None:
    text = run.failure(f"test_other_words[{backend}]")
    assert text.startswith("rank 1 of 2 died: SIGKILL")
    assert 'expected by the test, and not seen: "rank 0 of 2 died: SIGKILL"' in text


@ON_EACH
def test_an_expected_fault_that_does_not_happen_fails(run: Run, backend: str) -> None:
    text = run.failure(f"test_nothing[{backend}]")
    assert "faults.expect('rank 1 of 2 died: SIGKILL'): nothing happened to any rank" in text


FAILED = {
    "test_an_assertion": "AssertionError: a claim of this test",
    "test_an_error_of_its_own": "KeyError: 'own'",
    "test_failure_after_it": "assert 1 == 3",
}


@ON_EACH
@pytest.mark.parametrize("name", FAILED)
def test_failures_of_survivors_are_none_of_the_fault(run: Run, name: str, backend: str) -> None:
    text = run.failure(f"{name}[{backend}]")
    assert FAILED[name] in text
    assert text.startswith("rank 0 of 2 failed\nrank 1: died: SIGKILL, as the test expects")


@ON_EACH
def test_cases_go_on_after_one_that_fails_in_a_rebuilt_world(run: Run, backend: str) -> None:
    test = f"test_expected.py::TestWrong::test_a_case_after_it[{backend}]"
    for case in ("value=5, again=1", "value=5, again=2"):
        assert f"SUBFAILED[{case}] {test}" in run.output
    assert f"SUBFAILED[value=0, again=1] {test}" not in run.output


@ON_EACH
def test_all_ranks_have_to_rebuild(run: Run, backend: str) -> None:
    text = run.failure(f"test_only_one_rebuilds[{backend}]")
    assert "all ranks that are left must call it; rank 1 has ended the test, or died" in text


@ON_EACH
def test_the_death_of_all_ranks_is_a_failure(run: Run, backend: str) -> None:
    assert run.failure(f"test_all_die[{backend}]").startswith("all 2 ranks died: SIGKILL")


def _expect(meet: Callable[[Vote], Agreed]) -> Expectation:
    """Return an expectation of rank 0, at whose end ranks meet so."""
    return Expectation(Mock(meet=meet), Mock(rank=0, misses=list), LostPeers(), "SIGKILL", 1.0)


CASE = "faults.expect('SIGKILL')"


def test_what_others_met_in_the_place_of_a_fault_is_said() -> None:
    votes = (
        Vote(CASE, "lost others", "gloo timed out"),
        Vote(CASE, "ended"),
        Vote(CASE, "ended"),
    )
    instead = "rank 3 of 4 exited with code 3; rank 1 lost others: gloo timed out; rank 2 ended the test"
    message = f"{CASE}: this happened instead: {instead}"
    left = Happened(3, "rank 3 of 4 exited with code 3", 0.0)
    expectation = _expect(lambda vote: Agreed((vote, *votes), {FEATURE: (left,)}))
    with pytest.raises(pytest.fail.Exception, match=f"^{re.escape(message)}$"), expectation:
        pass


def test_all_ranks_have_to_enter_an_expectation() -> None:
    message = f"{CASE}: all ranks have to enter it, and come to its end"
    expectation = _expect(lambda vote: Agreed((vote, Vote("a=1", "passed"))))
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"), expectation:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.exit.Exception])
def test_what_ends_the_run_leaves_an_expectation_at_once(error: type[BaseException]) -> None:
    meet = Mock()
    with pytest.raises(error), _expect(meet):
        raise error
    meet.assert_not_called()
