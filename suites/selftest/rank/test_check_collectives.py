"""`--check-collectives`: a mismatch that a backend does not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.project import Project


@pytest.mark.parametrize(("backend", "verb"), [("gloo", "called"), ("shm", "was in")])
def test_check_collectives_reports_a_mismatch(project: Project, backend: str, verb: str) -> None:
    """gloo does not notice this one, shm does: its test fails with and without the option."""
    project.copy("unnoticed_mismatch")
    output = project.run("--check-collectives", f"--backend={backend}")
    assert "= 1 failed, 1 passed, 1 xfailed in " in output
    called = f"{verb} all_reduce #1"
    assert f"mismatch: rank 0 {called} (float [2]) while rank 1 {called} (int [2])" in output
