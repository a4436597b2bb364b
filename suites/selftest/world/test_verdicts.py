"""Reports of ranks that fail, skip, die or hang, each in its usual way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "verdicts"
BACKENDS = ("gloo", "shm")


def test_the_rank_that_failed_is_named_with_its_own_traceback(session: FaultSession) -> None:
    verdict = session["test_assertion_on_one_rank"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "E       assert 1 == 0" in verdict.text
    assert "rank 1: assert 1 == 0" in verdict.message


def test_a_failure_shows_the_output_of_the_rank_to_blame_only(session: FaultSession) -> None:
    assert "Captured stdout call (rank 1)" in session.output
    assert "said by 1" in session.output
    assert "said by 0" not in session.output


def test_a_rank_that_waits_for_a_failed_one_is_shown_in_one_line(session: FaultSession) -> None:
    verdict = session["test_assertion_while_the_other_waits"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.head()[1].startswith("rank 0: lost its connection to rank 1 at test_faults.py:")
    assert "gloo/transport" not in verdict.text
    assert verdict.seconds < 15  # the deadline is 30


def test_equal_tracebacks_are_shown_once(session: FaultSession) -> None:
    verdict = session["test_assertion_on_all_ranks"]
    assert verdict.head()[0].startswith("all 2 ranks failed, with the same traceback")
    assert verdict.text.count("E       assert 2 == 5") == 1


def test_the_first_failure_comes_first_and_others_follow(session: FaultSession) -> None:
    verdict = session["test_different_failures"]
    assert verdict.head() == ["rank 1 of 2 failed first", "rank 0: failed, see below"]
    assert verdict.text.index("ValueError: sooner") < verdict.text.index("KeyError: 'later'")
    assert "rank 1: ValueError: sooner" in verdict.message


def test_a_skip_on_one_rank_is_a_disagreement(session: FaultSession) -> None:
    verdict = session["test_skip_on_one_rank"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 skipped (not today) and others did not: ranks disagree"
    assert verdict.head()[1].startswith("rank 0: was in all_reduce #")
    assert verdict.seconds < 15  # the deadline is 30


def test_a_skip_on_all_ranks_is_a_skip(session: FaultSession) -> None:
    assert session["test_skip_on_all_ranks"].outcomes == ["skipped"]
    assert "not today" in session["test_skip_on_all_ranks"].message


def test_a_hang_is_reported_with_the_stacks_of_all_ranks(session: FaultSession) -> None:
    text = session["test_hang"].text
    assert "timed out after 1.5 s, in all_reduce #1 (half [3, 5]) at " in text
    assert "time.sleep(100)" in text
    assert "dist.all_reduce(torch.ones(3, 5, dtype=torch.float16))" in text
    assert session["test_hang"].seconds < 15  # not for ever


def test_a_rank_that_waits_in_vain_is_ended_before_the_deadline(
    session: FaultSession,
) -> None:
    verdict = session["test_collective_that_one_rank_misses"]
    sentence = "rank 1 waits in all_reduce #1 (float [3]), which rank 0 never reached: it has ended the test"
    assert verdict.message == sentence
    assert verdict.head()[0] == sentence
    assert verdict.head()[1].startswith("rank 1 of 2 killed by the harness after ")
    assert verdict.seconds < 15  # the deadline is 30


def test_a_collective_left_in_flight_fails_the_test(session: FaultSession) -> None:
    head = session["test_collective_left_in_flight"].head()
    assert head[0] == "rank 1 of 2 left all_reduce #1 (float [3]) in flight: not every rank has joined it"


def test_a_failed_tear_down_after_a_failure_is_not_reported(session: FaultSession) -> None:
    verdict = session["test_failure_before_a_collective_teardown"]
    assert verdict.outcomes == ["failure"]
    assert "the only news" in verdict.text


def test_a_rank_that_fails_alone_later_lost_no_connection(session: FaultSession) -> None:
    head = session["test_failures_of_two_phases"].head()
    assert head[0] == "rank 1 of 2 failed"
    assert head[1].startswith("rank 0: failed at test_faults.py:")
    assert "AssertionError: a failure in tear-down" in head[1]


def test_an_unexpected_pass_is_reported_as_in_pytest(session: FaultSession) -> None:
    assert "XPASS test_faults.py::test_unexpected_pass" in session.output
    assert session["test_strict_unexpected_pass"].outcomes == ["failure"]
    assert "[XPASS(strict)]" in session["test_strict_unexpected_pass"].text


def test_a_subtest_of_one_rank_fails_under_its_name(session: FaultSession) -> None:
    assert "SUBFAILED(i=2) test_faults.py::test_subtests - rank 1: " in session.output
    assert "FAILED test_faults.py::test_subtests - contains 1 failed subtest" in session.output


def test_passing_ranks_are_listed(session: FaultSession) -> None:
    assert session["test_third_rank_only"].head() == [
        "rank 2 of 3 failed",
        "rank 0: passed",
        "rank 1: passed",
    ]


def test_every_failure_ends_with_its_re_run_line(session: FaultSession) -> None:
    failed = {name: v for name, v in session.verdicts.items() if v.outcomes[0] in ("failure", "error")}
    for name, verdict in failed.items():
        of_subtest = "contains 1 failed subtest" in verdict.text
        assert of_subtest or f"pytest test_faults.py::{name}" in verdict.text
        assert of_subtest or "re-run (seed 0)" in verdict.text
