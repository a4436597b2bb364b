"""Tests that spawn, adopted, beside pytest-xdist and pytest-cov, and with options of tests on ranks."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import WITHOUT_PLUGINS, copy_project, line_of, run_pytest

if TYPE_CHECKING:
    from suites.selftest.project import Run

INI = "[pytest]\nranks_adopt = spawn\n"


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("spawn/beside", tmp_path_factory.mktemp("beside"))
    (path / "pytest.ini").write_text(INI)
    plugins = WITHOUT_PLUGINS | {"PYTEST_PLUGINS": "lockstep.plugin,xdist.plugin,pytest_cov.plugin"}
    environ = plugins | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    measure = ("--cov=library", "--cov-report=json")
    return run_pytest(path, "-n2", "--ranks-adopt-report", *measure, **environ)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("spawn/beside", tmp_path_factory.mktemp("faulty"))
    (path / "pytest.ini").write_text(INI)
    return run_pytest(path, "faulty.py", "--skew=7", "--timeline=drawn", "--maxfail=2", **WITHOUT_PLUGINS)


def test_workers_share_a_port_and_their_counts_are_added(distributed: Run) -> None:
    assert "7 passed" in distributed.count()
    assert "6 calls of spawn on warm ranks" in distributed.lines
    assert "2 processes from the server" in distributed.lines


def test_lines_of_warm_ranks_and_of_processes_count(distributed: Run) -> None:
    measured = json.loads((distributed.path / "coverage.json").read_text())["files"]
    never = line_of("return 0", distributed.path / "library.py")
    assert measured["library.py"]["missing_lines"] == [never]


def test_skew_finds_a_race(faulty: Run) -> None:
    assert "CollectiveRace: all_reduce #1 (float32[4], 2 ranks), begun at " in faulty.failure("test_race")


def test_the_timeline_of_a_hang_is_kept(faulty: Run) -> None:
    kept = faulty.path / "drawn" / "faulty.py" / "test_hang"
    assert "all_reduce" in (kept / "timeline.html").read_text()
    assert "which rank 1 never reached: it has ended the test" in faulty.failure("test_hang")


def test_the_number_of_failures_ends_the_run(faulty: Run) -> None:
    assert sorted(faulty.cases) == ["test_hang", "test_race"]
