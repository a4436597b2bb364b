"""Reports of ranks whose output is large, on closed streams, or no text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "output"


def test_much_output_hides_no_verdict(session: FaultSession) -> None:
    assert session["test_much_fails"].head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "AssertionError: after much" in session["test_much_fails"].message
    assert session["test_much_dies"].head()[:2] == ["rank 1 of 2 exited with code 5", "rank 0: passed"]


@pytest.mark.parametrize("name", ["test_much_fails", "test_much_dies"])
def test_much_output_does_not_fill_the_controller(session: FaultSession, name: str) -> None:
    assert session[name].megabytes < 100  # of the 100 that the rank wrote, times what each copy takes


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("test_stdout_closed_and_failed", "ValueError: after closing"),
        ("test_descriptors_closed_and_failed", "ValueError: after closing"),
        ("test_descriptors_redirected", "ValueError: after redirecting"),
        ("test_streams_replaced", "ValueError: after replacing"),
        ("test_streams_gone", "ValueError: without streams"),
        ("test_full_device", "ValueError: after filling"),
        ("test_bytes", "ValueError: after bytes"),
    ],
)
def test_a_failure_without_streams_is_reported_like_any_other(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert verdict.message == f"rank 1: {what}"


@pytest.mark.parametrize("name", ["test_stderr_closed_and_aborted", "test_descriptors_closed_and_aborted"])
def test_a_death_without_streams_shows_its_line(session: FaultSession, name: str) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith("rank 1 of 2 died: SIGABRT")
    assert f"in {name}" in verdict.text


def test_closed_descriptors_alone_are_no_failure(session: FaultSession) -> None:
    assert session["test_descriptors_closed"].outcomes == ["passed"]


def test_a_closed_stdout_is_reported_and_does_not_stop_pytest(session: FaultSession) -> None:
    assert session["test_stdout_closed"].outcomes == ["passed"]
    assert "sys.stdout closed" in session.output


def test_reading_from_the_terminal_is_an_error(session: FaultSession) -> None:
    verdict = session["test_input"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "reading from stdin while output is captured" in verdict.message


def test_output_that_is_no_text_is_shown(session: FaultSession) -> None:
    assert "Captured stdout call (rank 1)" in session.output
    assert "lone" in session.output
