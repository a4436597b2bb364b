"""pytest-rerunfailures: it runs a test on ranks again, each time in a world that no failed run has used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suites.selftest.project import Run, copy_project, run_pytest

pytest.importorskip("pytest_rerunfailures", reason="needs the extra `test`")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_pytest(copy_project("rerunfailures", tmp_path_factory.mktemp("alone")), "-v")


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_pytest(copy_project("rerunfailures", tmp_path_factory.mktemp("distributed")), "-v", "-n1")


def words(run: Run, name: str) -> list[str]:
    """Return what `-v` says of a test, without its subtests."""
    lines = [line for line in run.lines if "%]" in line and re.search(rf"::{name}\b", line)]
    return re.findall(r"\b(?:RERUN|PASSED|FAILED|ERROR)\b", "\n".join(lines))


OUTCOMES = {
    "test_twice": ["RERUN", "RERUN", "PASSED"],
    "test_after": ["PASSED"],
    "test_dies": ["RERUN", "PASSED"],
    "test_of_a_class": ["RERUN", "PASSED"],
    "test_of_another_text": ["FAILED"],
    "test_on_a_condition": ["FAILED"],
    "test_with_subtests": ["RERUN", "PASSED"],
    "test_in_tear_down": ["PASSED", "RERUN", "PASSED"],
    "test_always": ["RERUN", "FAILED"],
}


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("session", ["alone", "distributed"])
def test_a_test_runs_again_where_the_plugin_says_so(
    request: pytest.FixtureRequest, session: str, name: str
) -> None:
    assert words(request.getfixturevalue(session), name) == OUTCOMES[name]


@pytest.mark.parametrize("session", ["alone", "distributed"])
def test_the_runs_are_counted(request: pytest.FixtureRequest, session: str) -> None:
    run: Run = request.getfixturevalue(session)
    # Of 9 tests: the plugin counts one that fails in its tear-down as passed before it runs again.
    assert run.count() == "3 failed, 7 passed, 1 subtests passed, 7 rerun"


def test_each_run_has_a_new_world_and_none_begins_in_between(alone: Run) -> None:
    runs = (alone.path / "runs.txt").read_text().split()
    pids = (alone.path / "pids.txt").read_text().split()
    of_test = {name: [pid for run, pid in zip(runs, pids, strict=True) if run == name] for name in OUTCOMES}
    assert runs == [name for name in OUTCOMES for _ in of_test[name]]
    assert [len(of_test[name]) for name in OUTCOMES] == [3, 1, 2, 2, 1, 1, 2, 2, 2]
    assert all(len(set(each)) == len(each) for each in of_test.values())


def test_a_final_failure_is_reported_as_ever(alone: Run) -> None:
    assert "FAILED test_flaky.py::test_always - rank 1: test_flaky.Flaky: never" in alone.output
    assert "pytest test_flaky.py::test_always" in alone.output


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--force-reruns=3"], "1 passed, 2 rerun"),
        (["--reruns=2", "--max-suite-reruns=1"], "1 failed, 1 rerun"),
    ],
)
def test_options_hold_for_ranks(tmp_path: Path, options: list[str], count: str) -> None:
    file = copy_project("rerunfailures", tmp_path) / "test_flaky.py"
    file.write_text(file.read_text().replace("@pytest.mark.flaky(reruns=2, reruns_delay=0.2)\n", ""))
    assert run_pytest(tmp_path, *options, "test_flaky.py::test_twice").count() == count
