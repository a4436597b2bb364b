"""pytest-cov measures what runs on ranks as what runs in the controller, also where ranks are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("processes", [(), ("-n1",)], ids=["alone", "n"])
def test_lines_that_ran_on_ranks_are_counted(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "only_on_ranks.py").write_text("value = 1")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nranks_preload = only_on_ranks")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(
        [*command, *processes, "--cov=library", "--cov=only_on_ranks", "--cov-report=json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 failed, 3 passed in " in done.stdout
    measured = json.loads((tmp_path / "coverage.json").read_text())["files"]
    missing = {name: file["missing_lines"] for name, file in measured.items()}
    assert missing == {"library.py": [LIBRARY.splitlines().index(NOBODYS) + 1], "only_on_ranks.py": []}
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]
