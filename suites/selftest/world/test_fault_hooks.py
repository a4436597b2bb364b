"""Reports of failures of one rank outside of tests: in hooks, imports of test files, a conftest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suites.selftest.warm_pytest import run_module

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "hooks"


def test_files_after_a_broken_one_run(session: FaultSession) -> None:
    assert session["test_last"].outcomes == ["passed"]


@pytest.mark.parametrize(
    ("name", "outcome", "what"),
    [
        ("test_setup", "error", "ValueError: in setup"),
        ("test_call", "failure", "ValueError: in call"),
        ("test_teardown", "error", "ValueError: in teardown"),
        ("test_makereport", "failure", "ValueError: in makereport"),
        ("test_logreport", "failure", "ValueError: in logreport"),
        ("test_logstart", "error", "ValueError: in logstart"),
        ("test_logfinish", "error", "ValueError: in logfinish"),
        ("test_protocol", "error", "ValueError: in protocol"),
        ("test_protocol_exits", "error", "SystemExit: in protocol"),
        ("test_protocol_stops", "error", "_pytest.outcomes.Exit: in protocol"),
        ("test_fixture_setup", "error", "ValueError: in fixture_setup"),
    ],
)
def test_an_exception_of_a_hook_fails_its_phase(
    session: FaultSession, name: str, outcome: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == [outcome]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert f"rank 1: {what}" in verdict.message
    assert "conftest.py:" in verdict.text
    assert "lockstep/" not in verdict.text  # its frames are hidden


def test_a_hook_that_cannot_serialise_a_report_is_named(session: FaultSession) -> None:
    verdict = session["test_serialise"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[:2] == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "a report cannot be sent to the controller: a hook raised" in verdict.text
    assert "E   ValueError: in serialise" in verdict.text


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("import_raises", "ValueError: at import"),
        ("import_exits", "SystemExit: 3"),
        ("import_interrupts", "KeyboardInterrupt: at import"),
        ("import_stops", "_pytest.outcomes.Exit: at import"),
        ("import_by_hook", "ValueError: in itemcollected"),
        ("generate", "ValueError: in generate_tests"),
        ("below", "ValueError: below"),
    ],
)
def test_a_collection_error_of_one_rank_is_shown_with_its_line(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[f"test_{name}"]
    assert verdict.outcomes == ["error"]  # and not of the file that ran while it was collected
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.message == f'failed on setup with "rank 1: {what}"'
    assert f"E   {what}" in verdict.text


def test_a_file_that_one_rank_skips_is_reported_with_the_reason(session: FaultSession) -> None:
    verdict = session["test_import_skips"]
    assert verdict.outcomes == ["error"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "test_import_skips.py at import and others did not (Skipped: at import)" in verdict.text


def test_a_conftest_that_exits_on_one_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        'import os, sys\nif os.environ.get("RANK") == "1":\n    sys.exit(5)\n'
    )
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.ranks(2)\ndef test_it(world): pass\n")
    done = run_module("pytest", cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert (
        "no world of 2 ranks (gloo, cpu): rank 1 did not start: it raised before it ran a test" in done.stdout
    )
    assert "conftest.py:3: in <module>\n    sys.exit(5)\nE   SystemExit: 5" in done.stdout
