"""`python -m lockstep doctor` as a user runs it: its report, its exit status, and what it leaves."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from suites.selftest.project import Project

NEEDS_NOTHING = {"PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
"""Of an interpreter without site-packages."""


def doctor(project: Project, *args: str, python: tuple[str, ...] = (), **options: Any) -> Any:
    """Run the command in a project; return the finished process."""
    environ = {"TMPDIR": str(project.path / "tmp"), "LOCKSTEP_TEST_MARK": project.mark}
    environ |= options.pop("environ", {})
    command = [sys.executable, *python, "-m", options.pop("name", "harness"), "doctor", *args]
    return subprocess.run(
        command,
        cwd=project.path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )


def findings(done: Any) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def healthy(shared_project: Project) -> Any:
    return doctor(shared_project, "--json")


def test_every_backend_is_tried_on_two_ranks(healthy: Any) -> None:
    found = findings(healthy)
    for backend in ("gloo", "shm", "fake"):
        assert found[f"backend-{backend}"]["what"].startswith(f"{backend} works: two ranks")
    assert found["backend-nccl"]["level"] in ("ok", "note")


def test_the_status_is_0_where_nothing_is_wrong(healthy: Any) -> None:
    problems = [name for name, each in findings(healthy).items() if each["level"] == "problem"]
    assert (healthy.returncode, json.loads(healthy.stdout)["status"], problems) == (0, 0, [])


def test_the_versions_are_those_of_this_environment(healthy: Any) -> None:
    found = findings(healthy)
    assert found["pytest"]["what"] == pytest.__version__
    assert sys.version.split()[0] in found["python"]["what"]
    assert found["torch"]["what"].startswith("2.")


def test_nothing_is_left(healthy: Any, shared_project: Project) -> None:
    shared_project.assert_nothing_is_left()


def test_a_project_that_cannot_run_hears_why(project: Project) -> None:
    project.write_ini("ranks_preload = not_there\nranks_at_once = 1\nranks_start_method = forkserver")
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    done = doctor(project, name="lockstep", preexec_fn=limit)
    assert done.returncode == 1
    assert "note     open-files: a process may open 64 files, enough for" in done.stdout
    assert "PROBLEM  backend-gloo: gloo does not work on two ranks: a world of 2" in done.stdout
    assert "ranks_preload: cannot import not_there" in done.stdout
    names = "ranks-at-once, backend-gloo, backend-shm, backend-fake"
    assert f"problems: {names}; notes: " in done.stdout
    project.assert_nothing_is_left()


def test_it_runs_without_torch_and_pytest(project: Project) -> None:
    done = doctor(project, "--json", python=("-S",), environ=NEEDS_NOTHING)
    found = findings(done)
    for name in ("torch", "pytest", "numpy"):
        assert found[name]["what"] == "is not installed"
        assert f"-m pip install '{name}" in found[name]["remedy"].replace("torch", "'torch")
    assert (done.returncode, done.stderr) == (1, "")


def test_an_unknown_argument_is_refused(project: Project) -> None:
    done = doctor(project, "--everything")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown arguments: --everything" in done.stderr
