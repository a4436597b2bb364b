"""Reports of exceptions of every kind on one rank, and of skips and expected failures of one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "exceptions"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("test_unpicklable", "test_faults.Unpicklable: 1 and 2"),
        ("test_mute", "test_faults.Mute: <exception str() failed>"),
        ("test_repr_that_exits", "SystemExit: 4"),
        ("test_huge", "ValueError: begin xxx"),
        ("test_cause", "ValueError: above"),
        ("test_notes", "ValueError: noted"),
        ("test_group", "ExceptionGroup: outer (2 sub-exceptions)"),
        ("test_base", "test_faults.Base: low"),
        ("test_base_group", "BaseExceptionGroup: outer (2 sub-exceptions)"),
        ("test_generator_exit", "GeneratorExit: of no generator"),
        ("test_sys_exit_0", "SystemExit: 0"),
        ("test_sys_exit_text", "SystemExit: a reason"),
        ("test_keyboard_interrupt", "KeyboardInterrupt: pressed"),
        ("test_pytest_exit", "_pytest.outcomes.Exit: enough"),
        ("test_pytest_fail", "Failed: a plain sentence"),
        ("test_binary_text", "ValueError: zero #x00 escape #x1B[31m lone #xDCFF"),  # as XML may have it
    ],
)
def test_an_exception_of_any_kind_is_the_failure_of_its_rank(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert re.match(
        r"rank 0: (lost its connection to rank 1 at|was in) ", verdict.head()[1]
    )  # where, if there was time
    assert verdict.message.startswith(f"rank 1: {what}")
    assert verdict.seconds < 15  # the deadline is 30


def test_causes_notes_and_groups_of_exceptions_are_shown(session: FaultSession) -> None:
    assert "The above exception was the direct cause" in session["test_cause"].text
    assert "KeyError: 'deep'" in session["test_cause"].text
    assert "a note on it" in session["test_notes"].text
    for part in ("ValueError: one", "ExceptionGroup: inner (1 sub-exception)", "KeyError: 'two'"):
        assert part in session["test_group"].text
    assert "KeyboardInterrupt: two" in session["test_base_group"].text
    assert "x" * 10_000_000 in session["test_huge"].text or "[" in session["test_huge"].text


def test_a_failure_names_its_line(session: FaultSession) -> None:
    assert f"{session.place('# of one rank')}: Unpicklable" in session["test_unpicklable"].text


def test_a_local_without_a_repr_is_shown_as_pytest_shows_it(session: FaultSession) -> None:
    verdict = session["test_local_without_repr"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "<[RuntimeError('no words') raised in repr()] Mute object at 0x" in verdict.message


def test_an_argument_that_was_freed_is_shown_as_that(session: FaultSession) -> None:
    """torch would read its memory, and end the process."""
    verdict = session["test_argument_that_was_freed"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "weight = tensor(<freed>, size=(4,), dtype=torch.float32)" in verdict.text


@pytest.mark.parametrize(
    ("name", "phase", "what"),
    [
        ("test_interrupt_in_set_up", "setup", "KeyboardInterrupt: early"),
        ("test_interrupt_in_tear_down", "teardown", "KeyboardInterrupt: late"),
        ("test_pytest_exit_in_set_up", "setup", "_pytest.outcomes.Exit: early"),
        ("test_module_fixture", "setup", "ValueError: wide"),
    ],
)
def test_an_exception_of_a_fixture_fails_its_phase(
    session: FaultSession, name: str, phase: str, what: str
) -> None:
    assert session[name].outcomes == ["error"]
    assert session[name].head()[0] == "rank 1 of 2 failed"
    assert session[name].message == f'failed on {phase} with "rank 1: {what}"'


def test_a_fixture_that_is_not_there_is_named(session: FaultSession) -> None:
    verdict = session["test_fixture_that_is_not_there"]
    assert verdict.outcomes == ["error"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "fixture 'no_such_fixture' not found" in verdict.text


def test_an_exception_in_a_thread_is_a_warning_as_in_pytest(session: FaultSession) -> None:
    assert session["test_thread"].outcomes == ["passed"]
    assert "PytestUnhandledThreadExceptionWarning: Exception in thread" in session.output


@pytest.mark.parametrize(
    ("name", "what"), [("test_thread", "in a thread"), ("test_unraisable", "in a finaliser")]
)
def test_unraisable_exceptions_fail_where_warnings_are_errors(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[f"{name}_as_error"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert f"       ValueError: {what}" in verdict.text


@pytest.mark.parametrize(
    ("name", "outcome", "what"),
    [
        ("test_skip", "failure", "skipped (not here)"),
        ("test_unittest_skip", "failure", "skipped (not here)"),
        ("test_importorskip", "failure", "skipped (could not import 'no_such_module'"),
        ("test_skip_in_set_up", "error", "skipped (not here)"),
        ("test_skip_in_tear_down", "error", "skipped (not here)"),
        ("test_xfail", "failure", "xfailed (not yet)"),
        ("test_xfail_while_the_other_waits", "failure", "xfailed (not yet)"),
        ("test_xfail_in_set_up", "error", "xfailed (not yet)"),
    ],
)
def test_a_skip_or_xfail_of_one_rank_is_a_disagreement(
    session: FaultSession, name: str, outcome: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == [outcome]
    assert verdict.head()[0].startswith(f"rank 1 of 2 {what}")
    assert verdict.head()[0].endswith(" and others did not: ranks disagree")


@pytest.mark.parametrize(
    ("name", "code"),
    [("test_skip", "# never joined"), ("test_xfail_while_the_other_waits", "# never returns")],
)
def test_a_rank_that_waits_for_one_that_left_is_shown(session: FaultSession, name: str, code: str) -> None:
    verdict = session[name]
    assert verdict.head()[1].startswith("rank 0: was in barrier #")
    assert f"at {session.place(code)}" in verdict.head()[1]
    assert verdict.seconds < 15  # the deadline is 30


def test_a_failure_of_another_rank_wins_over_an_xfail(session: FaultSession) -> None:
    verdict = session["test_xfail_and_failure"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 0 of 2 failed", "rank 1: xfailed (not yet)"]


@pytest.mark.parametrize(
    "name",
    [
        "test_xfail_on_all",
        "test_marked",
        "test_marked_and_late_on_one_rank",
        "test_marked_and_called",
        "test_marked_by_one_rank",
    ],
)
def test_an_expected_failure_of_all_ranks_or_of_one_is_an_xfail(session: FaultSession, name: str) -> None:
    assert session[name].outcomes == ["skipped"]
    assert f"XFAIL test_faults.py::{name}" in session.output


def test_an_unexpected_failure_wins_over_an_expected_one(session: FaultSession) -> None:
    verdict = session["test_expected_and_unexpected"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 0 of 2 failed", "rank 1: failed as expected"]
    assert "KeyError: 'surprise'" in verdict.message
