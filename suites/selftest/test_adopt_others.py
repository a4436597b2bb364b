"""`benchmarks/adopt_others` compares the tests of another project before and after, one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TESTS = """
import multiprocessing, pathlib, pytest

def test_starts():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()

def test_changes():
    seen = pathlib.Path("seen")
    assert not seen.exists(), "it ran before"
    seen.touch()

def test_skips():
    pytest.skip("for a reason")
"""
PROJECTS = """
[small]
packages = ["pytest"]
[[small.parts]]
name = "the small one"
args = ["test_small.py"]
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("checkouts")
    for name in ("small", "small.venv/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "small" / "test_small.py").write_text(TESTS)
    (folder / "projects.toml").write_text(PROJECTS)
    python = folder / "small.venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = ["--projects", str(folder / "projects.toml"), "--after", "-p no:lockstep", "--store", "stored"]
    return subprocess.run(
        [sys.executable, PROJECT / "benchmarks" / "adopt_others", folder, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )


def test_a_row_has_the_verdicts_of_both_runs_and_who_starts(
    compared: subprocess.CompletedProcess[str],
) -> None:
    cells = [cell.strip() for cell in compared.stdout.splitlines()[2].split("|")]
    assert cells[1:6] == ["the small one", "Process spawn: 1", "-p no:lockstep", "2/0/1", "1/1/1"]
    assert cells[8] == "1"  # test that starts processes and passes both ways


def test_a_verdict_that_differs_is_listed(compared: subprocess.CompletedProcess[str]) -> None:
    listed = next(line for line in compared.stdout.splitlines() if "test_changes" in line)
    cells = [cell.strip() for cell in listed.split("|")]
    assert cells[3:6] == ["test_small.py::test_changes", "passed", "failed"]
    assert "it ran before" in cells[6]
    assert compared.returncode == 1


def test_what_was_stored_is_shown_again(compared: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    stored = Path(compared.args[2]) / "stored"
    shown = subprocess.run(
        [*compared.args[:2], "--show", stored], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert shown.stdout == compared.stdout


def test_an_unknown_project_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, PROJECT / "benchmarks" / "adopt_others", tmp_path, "--only", "unknown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("projects.toml has no unknown; it has transformers")
