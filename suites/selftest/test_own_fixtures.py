"""A project whose fixtures have the names of ours: theirs come first, ours are imported under other names."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.selftest.project import Run, copy_project, run_pytest

PROJECT = "own_fixtures"
OPTIONS = ("test_own.py",)


@pytest.mark.parametrize(
    "name",
    [
        "test_without_ranks",
        *("test_parametrized[stamps]", "test_parametrized[coins]"),
        *("test_an_argument_of_that_name[1]", "test_an_argument_of_that_name[2]"),
    ],
)
def test_a_project_keeps_its_own_fixtures(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


@pytest.mark.parametrize("name", ["test_on_ranks", "test_cases"])
def test_our_fixtures_are_used_under_other_names(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


def test_an_unmarked_test_of_our_world_is_refused_by_its_name(tmp_path: Path) -> None:
    path = copy_project("own_fixtures", tmp_path)
    assert (
        "lacking_the_mark.py::test_unmarked: the fixture `rank_world` exists only on ranks: mark the test, "
        "its class or its module with pytest.mark.ranks(2)"
    ) in run_pytest(path, "lacking_the_mark.py").output
