"""Code that reads the launcher's environment meets its peers on ranks."""

from __future__ import annotations

import pytest

from suites.selftest.project import Project


@pytest.mark.parametrize("workers", [(), ("-n4", "-pxdist")], ids=["one-controller", "four-workers"])
def test_groups_from_the_environment_meet_again_and_again(project: Project, workers: tuple[str, ...]) -> None:
    project.copy("launcher", "ranks_leaks = error")
    assert "6 passed" in project.run(*workers).splitlines()[-1]
