"""The self-tests that run on ranks themselves, on shared memory instead of gloo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SELFTEST = Path(__file__).parents[1]
FILES = ("assertions", "rank/test_groups.py", "rank/test_world_fixture.py")


def test_self_tests_on_ranks_pass_on_shm() -> None:
    """Logs of collectives have the same entries, and groups end at the same moment."""
    files = [str(SELFTEST / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "ranks", "--backend=shm", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        cwd=SELFTEST.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    counts = re.search(r"^(\d+) passed, \d+ deselected in ", done.stdout, re.MULTILINE)
    assert counts is not None, done.stdout
    assert int(counts[1]) > 50
