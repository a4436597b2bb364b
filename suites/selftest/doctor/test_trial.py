"""A trial that runs no test is one finding, which says what pytest has printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.doctor import trial
from lockstep.doctor.configuration import Configuration

PROJECT = Configuration(None, {})


def test_a_trial_that_does_not_end_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WITHIN", 0.01)
    with trial.Trial(PROJECT, None) as run:
        (found,) = run.findings()
        assert (found.level, found.what) == ("problem", "pytest has not ended within 0.01 s")
        path = run.path
    assert not path.exists()


def test_the_end_of_the_output_of_a_trial_without_tests_is_shown() -> None:
    with trial.Trial(PROJECT, "no_such_plugin") as run:
        (found,) = run.findings()
    first, *output = found.what.splitlines()
    assert (found.level, first) == ("problem", "pytest has run no test: exit status 4")
    assert len(output) <= 8
    assert "no_such_plugin" in output[-1]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands of trials, of which none is started, their options, and what is done with their process."""
    found: list[Any] = []

    def start(command: list[str], **options: Any) -> Any:
        found.extend([command, options])
        return SimpleNamespace(pid=77, wait=lambda: found.append("waited"))

    monkeypatch.setattr(trial.subprocess, "Popen", start)
    monkeypatch.setattr(os, "killpg", lambda *given: found.append(given))
    return found


@pytest.mark.parametrize("are_there", [False, True])
def test_a_trial_runs_with_what_a_user_would_have(
    begun: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_there: bool
) -> None:
    leases = tmp_path / "leases"
    monkeypatch.setenv("LOCKSTEP_LEASES", str(leases))
    monkeypatch.setenv("OF_USER", "1")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    if are_there:
        leases.mkdir()
    with trial.Trial(PROJECT, "lockstep") as run:
        path = run.path
        assert (path / "pytest.ini").read_text() == "[pytest]\n"
        tests = (path / "test_trial.py").read_text()
        assert tests.startswith("import pytest\nimport torch\nimport torch.distributed as dist\n")
        assert [f"def test_{name}(world):" in tests for name in ("gloo", "nccl", "shm", "fake")] == [True] * 4
    command, options, *ended = begun
    assert command == [
        *(sys.executable, "-m", "pytest", f"{path}/test_trial.py", "-c", f"{path}/pytest.ini"),
        *("-o", "addopts=", "-o", "ranks_wait=10", "-p", "no:cacheprovider", "-p", "no:randomly"),
        *(f"--rootdir={path}", f"--confcutdir={path}", f"--basetemp={path}/temp"),
        *(f"--junitxml={path}/report.xml", "--world-timeout=20", "--tb=short", "-p", "lockstep"),
    ]
    environ, output = options.pop("env"), options.pop("stdout")
    assert options == {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    assert output.name == str(path / "output")
    own = {name: value for name, value in os.environ.items() if name not in trial._NOT_OF_A_USER}
    assert environ == own | {"LOCKSTEP_LEASES": str(leases if are_there else path / "leases")}
    assert (
        environ.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"}
        == set()
    )
    assert ended == [(77, signal.SIGKILL), "waited"]
    assert not path.exists()


def test_a_trial_has_the_configuration_of_the_project(begun: list[Any], tmp_path: Path) -> None:
    with trial.Trial(Configuration(tmp_path / "tox.ini", {}), None) as run:
        assert not (run.path / "pytest.ini").exists()
    command = begun[0]
    assert command[command.index("-c") + 1] == str(tmp_path / "tox.ini")
    assert command[-1] == "--tb=short"


def test_a_trial_that_has_ended_has_a_finding_for_each_case(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(within: float | None = None) -> None:
        begun.append(within)

    with trial.Trial(PROJECT, None) as run:
        monkeypatch.setattr(run, "_process", SimpleNamespace(pid=77, wait=ends, returncode=3))
        (run.path / "output").write_text("\n".join(map(str, range(9))))
        (found,) = run.findings()
        assert found.what == "\n".join(["pytest has run no test: exit status 3", *map(str, range(1, 9))])
        cases = '<testcase name="test_gloo" time="1.5"/><testcase name="test_shm" time="1.5"/>'
        (run.path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        assert [each.name for each in run.findings()] == ["backend-gloo", "backend-shm"]
        assert begun[-1] == trial.WITHIN
