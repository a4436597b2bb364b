"""Property tests on ranks from one run to the next: database, seeds, statistics, pytest -n."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from suites.selftest.conftest import Project

TESTS = """
from hypothesis import Phase, event, given, settings, strategies as st

few = settings(max_examples=30, phases=[phase for phase in Phase if phase is not Phase.explain])

def see(world, number, name):
    with pathlib.Path(f"{name}-{world.rank}.txt").open("a") as file:
        file.write(f"{number}\\n")

@few
@given(st.integers())
def test_kept(world, number):
    see(world, number, "kept")
    assert world.rank == 0 or number < 100

@settings(few, database=None)
@given(st.integers())
def test_not_kept(world, number):
    see(world, number, "not_kept")
    assert world.rank == 0 or number < 100

@few
@given(st.integers())
def test_passes(world, number):
    see(world, number, "passes")
    event("seen")

@few
@given(st.integers(0, 6))
def test_kills(world, number):
    see(world, number, "kills")
    if world.rank == 1 and number > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
"""
NAMES = ("kept", "not_kept", "passes", "kills")
Seen = dict[str, list[list[str]]]
"""The examples that each rank saw, in order, by test."""


class Runs:
    """A run, and what followed from it: a second one under pytest-xdist, and one of a line to re-run."""

    def __init__(self, project: Project) -> None:
        project.write(TESTS, "ranks_preload = hypothesis.strategies")
        self.first = project.run("--hypothesis-show-statistics")
        self.first_seen = _take_seen(project.path)
        self.second = project.run("--hypothesis-show-statistics", "-n1")
        self.second_seen = _take_seen(project.path)
        lines: list[str] = re.findall(r"^pytest (.*--hypothesis-seed.*)$", self.first, re.MULTILINE)
        self.again = project.run(*shlex.split(lines[0])) if len(lines) == 1 else ""
        self.again_seen = _take_seen(project.path)


def _take_seen(path: Path) -> Seen:
    seen = {}
    for name in NAMES:
        files = [path / f"{name}-{rank}.txt" for rank in (0, 1)]
        seen[name] = [file.read_text().split() if file.exists() else [] for file in files]
        for file in files:
            file.unlink(missing_ok=True)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    from suites.selftest.conftest import Project

    project = Project(tmp_path_factory.mktemp("runs"), plugins=True)
    yield Runs(project)
    project.kill()


def test_ranks_see_the_same_examples_from_first_to_last(runs: Runs) -> None:
    for name in ("kept", "not_kept", "passes"):
        of_rank_0, of_rank_1 = runs.first_seen[name]
        assert of_rank_0 == of_rank_1
    assert len(runs.first_seen["passes"][0]) == 30


def test_runs_see_different_examples(runs: Runs) -> None:
    assert runs.first_seen["passes"] != runs.second_seen["passes"]


def test_a_failing_example_is_tried_first_in_the_next_run(runs: Runs) -> None:
    assert [seen[0] for seen in runs.second_seen["kept"]] == ["100", "100"]
    assert len(runs.second_seen["kept"][0]) < len(runs.first_seen["kept"][0])


def test_an_example_that_killed_a_rank_is_tried_first_in_the_next_run(runs: Runs) -> None:
    assert [seen[0] for seen in runs.second_seen["kills"]] == ["5", "5"]
    assert runs.second_seen["kills"][1].count("5") == 1


def test_the_line_to_re_run_holds_the_seed_where_nothing_else_keeps_the_example(runs: Runs) -> None:
    assert runs.again_seen["not_kept"] == runs.first_seen["not_kept"]
    assert re.search(r"E +number=100,", runs.again)


def test_statistics_are_told_once_for_each_test(runs: Runs) -> None:
    told = runs.first.partition("Hypothesis Statistics")[2]
    assert re.findall(r"^test_sample.py::(\w+):$", told, re.MULTILINE) == [f"test_{name}" for name in NAMES]
    assert told.count("* 100.00%, seen") == 1


def test_statistics_reach_the_user_of_pytest_xdist(runs: Runs) -> None:
    told = runs.second.partition("Hypothesis Statistics")[2]
    named = re.findall(r"^test_sample.py::(\w+):$", told, re.MULTILINE)
    assert sorted(named) == sorted(f"test_{name}" for name in NAMES)
