"""Reports of collectives that ranks do not issue alike, and of process groups that are gone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "collectives"
BACKENDS = ("gloo", "shm")


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("test_order", ("all_reduce", "broadcast")),
        ("test_one_missing", ("all_reduce", "barrier")),
        ("test_operation_in_backward", ("all_gather", "all_reduce")),
    ],
)
def test_a_mismatch_names_what_each_rank_is_in(
    session: FaultSession, name: str, operations: tuple[str, str]
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    # On shm they are not in it any more: it raises.
    first, second = (rf"rank {rank} (is|was) in {name} #\d+( .*)?" for rank, name in enumerate(operations))
    # The rank that arrived later may be named first.
    sentence = rf"mismatch: ({first} while {second}|{second} while {first})"
    assert re.fullmatch(sentence, verdict.message)
    assert verdict.head()[0] == verdict.message
    assert f"{operations[0]} #1 (float [3])" in verdict.message
    assert verdict.seconds < 20  # far from the deadline


def test_a_receive_while_the_other_is_in_a_collective(session: FaultSession) -> None:
    verdict = session["test_receive"]
    assert verdict.outcomes == ["failure"]
    place = session.place("dist.recv(torch.ones(3), 0)")
    sentence = "rank 0 waits in all_reduce #1 (float [3]), which rank 1 never reached: it waits to receive"
    assert verdict.head()[0] == f"{sentence} float32 [3] from rank 0 (recv at {place})"
    assert verdict.seconds < 20  # far from the deadline


def test_a_collective_of_one_rank_in_backward_names_both_ranks(session: FaultSession) -> None:
    head = session["test_one_missing_in_backward"].head()
    sentence = r"rank 1 waits in all_reduce #\d+ .*, which rank 0 never reached: it has ended the test"
    assert re.fullmatch(sentence, head[0])
    assert session.place("# a hook") in head[1]


def test_two_groups_in_opposite_order_are_a_deadlock(session: FaultSession) -> None:
    sentence = session["test_two_groups_in_opposite_order"].message
    assert sentence.startswith("deadlock: rank 0 waits in all_reduce #1 (float [1]) of group ")
    assert "(ranks 0, 1) for rank 1; rank 1 waits in all_reduce #1 (float [1]) of group " in sentence


@pytest.mark.parametrize(
    "name", ["patient", "timeout_of_a_group", "threads_with_a_group_each", "sleep_with_work_in_flight"]
)
def test_ranks_that_will_make_progress_are_left_alone(session: FaultSession, name: str) -> None:
    assert session[f"test_{name}"].outcomes == ["passed"]


def test_a_rank_outside_of_a_group_is_reported_too(session: FaultSession) -> None:
    sentence = "rank 0 waits in barrier #1, which rank 1 never reached: it has ended the test; rank 2 never"
    assert session["test_outside_of_a_group"].message.startswith(sentence)


def test_a_deadlocked_case_is_named_and_the_other_cases_run(session: FaultSession) -> None:
    verdict = session["test_cases"]
    assert "rank 1 waits in all_reduce #2 (float [2]), which rank 0 never reached: " in verdict.text
    assert "it has ended the subtest [n=2]" in verdict.text
    assert "--subtest n=2" in verdict.text
    assert "contains 1 failed subtest" in verdict.text


def test_a_mismatch_in_a_case_is_named_as_outside_of_cases(session: FaultSession) -> None:
    verdict = session["test_mismatch_in_a_case"]
    first, second = (
        rf"rank {rank} (is|was) in {call} #2 \(float \[2\]\)"
        for rank, call in enumerate(("all_reduce", "broadcast"))
    )
    assert re.fullmatch(f"mismatch: ({first} while {second}|{second} while {first})", verdict.head()[0])
    assert "--subtest n=2" in verdict.text
    assert "contains 1 failed subtest" in verdict.text


def test_a_traceback_has_no_frames_of_the_backend(session: FaultSession) -> None:
    for name in ("test_order", "test_mismatch_in_a_case", "test_failure_in_backward"):
        assert "lockstep/shm/" not in session[name].text


def test_a_case_that_catches_the_abort_of_its_deadlock_fails(session: FaultSession) -> None:
    verdict = session["test_rescue_in_a_case"]
    assert "rank 0 waits in all_reduce #2 (float [5]), which rank 1 never reached: " in verdict.text
    assert "contains 1 failed subtest" in verdict.text  # the next case runs in a new group


def test_a_collective_after_all_cases_belongs_to_none_of_them(session: FaultSession) -> None:
    verdict = session["test_one_missing_after_cases"]
    sentence = "rank 1 waits in all_reduce #3 (float [6]), which rank 0 never reached: it has ended the test"
    assert verdict.head()[0] == sentence
    assert "--subtest" not in verdict.text


def test_a_failure_in_a_hook_of_backward_is_the_cause(session: FaultSession) -> None:
    verdict = session["test_failure_in_backward"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.head()[1].startswith("rank 0: ")  # and no cause
    assert verdict.message == "rank 1: ValueError: in a hook"


def test_ddp_names_the_rank_with_an_unused_parameter(session: FaultSession) -> None:
    verdict = session["test_ddp_with_an_unused_parameter"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "RuntimeError: Expected to have finished reduction in the prior iteration" in verdict.message


def test_a_unit_that_one_rank_skips_is_reported(session: FaultSession) -> None:
    verdict = session["test_engine_with_a_skipped_unit"]
    assert verdict.outcomes == ["failure"]
    sentences = {
        "gloo": r"rank 0 waits in all_to_all #\d+ .*, which rank 1 never reached: it has ended the test",
        "shm": r"mismatch: rank 0 was in all_gather_\w+ #(\d+) .* while rank 1 was in \w+ #\1 .*",
    }
    assert re.fullmatch(sentences[session.backend], verdict.head()[0])
    assert verdict.seconds < 20  # a bound against hanging


def test_a_rank_without_a_gradient_in_a_unit_is_reported(session: FaultSession) -> None:
    verdict = session["test_engine_without_a_gradient_in_a_unit"]
    assert verdict.outcomes == ["failure"]
    sentences = {
        "gloo": r"rank 0 waits in all_to_all #\d+ .*, which rank 1 never reached: it has ended the test",
        "shm": r"mismatch: rank 0 was in reduce_\w+ #(\d+) .* while rank 1 was in all_gather_\w+ #\1 .*",
    }
    assert re.fullmatch(sentences[session.backend], verdict.head()[0])
    assert verdict.seconds < 20  # a bound against hanging


def test_a_rank_that_destroyed_the_group_is_the_cause(session: FaultSession) -> None:
    verdict = session["test_group_destroyed_before_a_collective"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "Default process group has not been initialized" in verdict.message


@pytest.mark.parametrize("when", ["at_the_end", "by_all"])
def test_a_group_that_is_destroyed_last_is_no_failure(session: FaultSession, when: str) -> None:
    assert session[f"test_group_destroyed_{when}"].outcomes == ["passed"]
