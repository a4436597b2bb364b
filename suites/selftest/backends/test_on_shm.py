"""Self-tests on ranks, on shared memory instead of gloo; groups of shm in worlds of gloo; its preloading."""

from __future__ import annotations

import os
import re
from pathlib import Path

from suites.selftest.project import Run, copy_project, run_pytest
from suites.selftest.warm_pytest import run_to_end

SELFTEST = Path(__file__).parents[1]
PROJECT = "shm_in_gloo"
OPTIONS = ("test_gloo.py",)
FILES = ("assertions", "recorders", "rank/test_groups.py", "rank/test_world_fixture.py")


def test_self_tests_on_ranks_pass_on_shm() -> None:
    """Logs of collectives have the same entries, and groups end at the same moment."""
    files = [str(SELFTEST / file) for file in FILES]
    options = ("-q", "-m", "ranks", "--backend=shm", "-p", "no:cacheprovider")
    output = run_to_end((*options, *files), SELFTEST.parents[1], os.environ, timeout=300)[1]
    counts = re.search(r"^(\d+) passed, \d+ deselected in ", output, re.MULTILINE)
    assert counts is not None, output
    assert int(counts[1]) > 50


def test_a_log_says_that_shm_was_imported_too_late(run: Run) -> None:
    assert run.outcome("test_imports_in_its_body") == "passed"


def test_a_log_in_a_world_of_gloo_has_the_collectives_of_shm(run: Run) -> None:
    assert run.outcome("test_log") == "passed"


def test_the_server_imports_shm_for_a_file_that_names_it(tmp_path: Path) -> None:
    run = run_pytest(copy_project(PROJECT, tmp_path), "test_preload.py")
    assert run.outcome("test_is_preloaded") == "passed"
