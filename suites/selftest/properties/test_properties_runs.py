"""Property tests on ranks from one run to the next: database, seeds, statistics, pytest -n."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import Project

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("kept", "not_kept", "passes", "kills")
Seen = dict[str, list[list[str]]]
"""The examples that each rank saw, in order, by test."""


class Runs:
    """A run, and what followed from it: a second one under pytest-xdist, and one of a line to re-run."""

    def __init__(self, project: Project) -> None:
        project.copy("property_runs", "ranks_preload = hypothesis.strategies")
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


def test_an_example_that_killed_a_rank_is_tried_first_later(runs: Runs) -> None:
    assert [seen[0] for seen in runs.second_seen["kills"]] == ["5", "5"]
    assert runs.second_seen["kills"][1].count("5") == 1


def test_the_re_run_line_has_the_seed_of_an_unsaved_example(runs: Runs) -> None:
    assert runs.again_seen["not_kept"] == runs.first_seen["not_kept"]
    assert re.search(r"E +number=100,", runs.again)


def test_statistics_are_shown_once_for_each_test(runs: Runs) -> None:
    statistics = runs.first.partition("Hypothesis Statistics")[2]
    assert re.findall(r"^test_sample.py::(\w+):$", statistics, re.MULTILINE) == [
        f"test_{name}" for name in NAMES
    ]
    assert statistics.count("* 100.00%, seen") == 1


def test_statistics_reach_the_user_of_pytest_xdist(runs: Runs) -> None:
    statistics = runs.second.partition("Hypothesis Statistics")[2]
    named = re.findall(r"^test_sample.py::(\w+):$", statistics, re.MULTILINE)
    assert sorted(named) == sorted(f"test_{name}" for name in NAMES)
