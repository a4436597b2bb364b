"""pytest-cov measures what runs on ranks, also where they are killed; what else `pytest -n` must not lose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIBRARY = """
def in_the_controller():
    return "a line of the controller's"

def on_rank(rank):
    if rank == 1:
        return "a line of rank 1's"
    return "a line of rank 0's"

def before_the_end():
    return "a line that ran a while before a rank was killed"

def never():
    return "a line that nobody runs"
"""
NOBODYS = '    return "a line that nobody runs"'
TESTS = """
import os, signal, time, warnings, pytest, library

def test_plain():
    library.in_the_controller()

@pytest.mark.ranks(2)
def test_ranks(world):
    library.on_rank(world.rank)
    import only_on_ranks

@pytest.mark.ranks(1)
def test_long(world):
    library.before_the_end()
    time.sleep(1.1)

@pytest.mark.ranks(1)
def test_killed(world):
    print("dying")
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.ranks(2)
def test_points(world, run_subtests):
    def claim(n):
        assert n == 1
    run_subtests({"n": [1, 2]}, claim)
"""
CONFTEST = """
import os

def pytest_unconfigure():
    if "RANK" in os.environ:
        os.write(1, b"closing\\n")
"""


@dataclass(frozen=True)
class Measured:
    """A run of pytest --cov in GitHub Actions that is over."""

    path: Path
    output: str


def run(path: Path, *args: str) -> Measured:
    (path / "library.py").write_text(LIBRARY)
    (path / "only_on_ranks.py").write_text("value = 1")
    (path / "test_it.py").write_text(TESTS)
    (path / "conftest.py").write_text(CONFTEST)
    (path / "pytest.ini").write_text("[pytest]\nranks_preload = only_on_ranks")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *args]
    done = subprocess.run(
        [*command, "--cov=library", "--cov=only_on_ranks", "--cov-report=json", "--junitxml=report.xml"],
        cwd=path,
        env={
            **os.environ,
            "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}",
            "GITHUB_ACTIONS": "true",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Measured(path, done.stdout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return run(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return run(tmp_path_factory.mktemp("distributed"), "-n1", "--rank-output-dir=kept")


@pytest.mark.parametrize("processes", ["alone", "distributed"])
def test_lines_that_ran_on_ranks_are_counted(request: pytest.FixtureRequest, processes: str) -> None:
    done: Measured = request.getfixturevalue(processes)
    # The last test fails with its point, which counts too.
    assert "3 failed, 3 passed in " in done.output
    measured = json.loads((done.path / "coverage.json").read_text())["files"]
    missing = {name: file["missing_lines"] for name, file in measured.items()}
    assert missing == {"library.py": [LIBRARY.splitlines().index(NOBODYS) + 1], "only_on_ranks.py": []}
    assert [path.name for path in done.path.glob(".coverage*")] == [".coverage"]


def test_under_pytest_n_annotations_are_written_once_and_properties_arrive(distributed: Measured) -> None:
    annotations = [line for line in distributed.output.splitlines() if line.startswith("::")]
    titles = sorted(re.findall("title=(.*?)::", line)[0] for line in annotations)
    assert titles == ["test_killed", "test_points [n=2]"]
    cases = ElementTree.parse(distributed.path / "report.xml").iter("testcase")
    [killed] = [case for case in cases if case.get("name") == "test_killed"]
    told = {node.get("name"): node.get("value") for node in killed.iter("property")}
    assert (told["rank"], told["cause"]) == ("0", "died: SIGKILL")


def test_under_pytest_n_the_controllers_keep_output(distributed: Measured) -> None:
    kept = distributed.path / "kept"
    assert [path.name for path in (kept / "outside-of-tests").glob("*")] == ["gw0"]
    assert (kept / "test_it.py" / "test_killed" / "rank-0.stdout").read_text() == "dying\n"
