"""A world that fails as it closes: its last test fails for it, though it has been reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.selftest.project import copy_project, run_pytest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "ERROR at teardown of test_subtests"),
        # A worker reports of the test alone that it runs, so the text names the other one.
        (["-n1"], "after test_closing.py::test_subtests: rank 0 of 2 ranks (gloo, cpu) exited with code"),
    ],
)
def test_a_test_with_failed_subtests_fails_for_its_world(
    tmp_path: Path, options: list[str], named: str
) -> None:
    run = run_pytest(copy_project("closing", tmp_path), *options)
    assert "INTERNALERROR" not in run.output
    assert run.count() == "4 failed, 1 passed, 1 error"
    assert named in run.output
    assert "AssertionError: closing" in run.output
    assert len(run.cases["test_subtests"]) + len(run.cases["test_next"]) == 3
