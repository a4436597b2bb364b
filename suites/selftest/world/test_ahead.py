"""The next test begins on the ranks while the controller reports the one that they have passed."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import Run, copy_project, run_pytest

if TYPE_CHECKING:
    from suites.selftest.project import Project


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("ahead")
    copy_project("ahead", path)
    return run_pytest(path, "test_run.py", "-rA")


def _section(run: Run, name: str) -> str:
    """Return what pytest shows of one test, failed or passed."""
    parts = run.output.split(f"_ {name} _")
    return parts[1].split("\n____")[0].split("\n====")[0]


def test_the_next_test_runs_while_the_last_is_reported(run: Run) -> None:
    assert (run.path / "held.txt").read_text().split("\n")[:2] == [
        "test_first True",
        "test_before_death True",
    ]


def test_it_runs_in_the_same_processes(run: Run) -> None:
    for rank in (0, 1):
        assert len(set((run.path / f"process-{rank}.txt").read_text().split())) == 1


def test_output_and_failure_belong_to_the_test_that_was_begun_ahead(run: Run) -> None:
    assert run.outcome("test_first") == "passed"
    assert run.outcome("test_second") == "failure"
    first, second = _section(run, "test_first"), _section(run, "test_second")
    assert "first on rank 1" in first
    assert "second on rank" not in first
    assert "AssertionError: as it should" in second
    assert "second on rank 1" in second
    assert "first on rank" not in second


def test_a_death_belongs_to_the_test_that_was_begun_ahead(run: Run) -> None:
    assert run.outcome("test_before_death") == "passed"
    assert run.outcome("test_dies") == "failure"
    assert "rank 1 of 2 died: SIGKILL" in _section(run, "test_dies")
    assert len((run.path / "about-to-die-1.txt").read_text().split()) == 1


def test_a_hang_belongs_to_the_test_that_was_begun_ahead(run: Run) -> None:
    assert run.outcome("test_before_hang") == "passed"
    assert run.outcome("test_hangs") == "failure"
    assert "rank 1 of 2 timed out after 1 s" in _section(run, "test_hangs")


def test_a_world_of_another_size_is_started_when_its_test_comes(run: Run) -> None:
    assert run.outcome("test_on_three") == "passed"


def test_wide_fixtures_stay_up_between_them(run: Run) -> None:
    # A new world after the failure of `test_second` sets it up again; the death leaves that one.
    assert len((run.path / "wide-set-up-0.txt").read_text().split()) == 2
    assert len((run.path / "wide-torn-down-0.txt").read_text().split()) == 1


def test_one_that_pytest_passes_over_is_ended(run: Run) -> None:
    assert "test_passed_over" not in run.cases
    assert run.outcome("test_last") == "passed"
    assert len((run.path / "last-0.txt").read_text().split()) == 1


def test_the_tests_are_reported_once_and_in_order(run: Run) -> None:
    assert [*run.cases] == [
        *("test_first", "test_second", "test_before_death", "test_dies", "test_before_hang", "test_hangs"),
        *("test_before_other", "test_on_three", "test_before_passed_over", "test_last"),
    ]


def test_a_run_that_stops_interrupts_it(project: Project) -> None:
    project.copy("ahead")
    output = project.run("test_end.py::test_stops", "test_end.py::test_next")
    assert "the project's own reason" in output
    assert "1 passed" in output
    assert (project.path / "held.txt").read_text() == "test_stops True\n"
    assert [len(project.pids("wide-torn-down", rank)) for rank in (0, 1)] == [1, 1]
    project.assert_nothing_is_left()


def test_nothing_begins_once_the_run_is_to_stop(project: Project) -> None:
    project.copy("ahead")
    output = project.run("test_end.py::test_stops_at_once", "test_end.py::test_next")
    assert "the project's own reason" in output
    assert "1 passed" in output
    assert project.pids("begun") == []


@pytest.mark.parametrize(("last", "passed"), [("test_unmarked", 2), ("test_passed_over", 1)])
def test_one_passed_over_ends_before_what_follows(project: Project, last: str, passed: int) -> None:
    project.copy("ahead")
    names = ("test_before_unmarked", "test_passed_over", "test_unmarked")
    chosen = names[: names.index(last) + 1]
    output = project.run(*(f"test_over.py::{name}" for name in chosen))
    assert f"{passed} passed" in output
    assert len(project.pids("begun", rank=1)) == 1
    assert [len(project.pids("wide-torn-down", rank)) for rank in (0, 1)] == [1, 1]
    project.assert_nothing_is_left()


def test_ctrl_c_between_two_tests_names_the_one_that_runs(project: Project) -> None:
    project.copy("ahead")
    output = project.run("test_end.py::test_interrupts", "test_end.py::test_next")
    place = r"(test_end\.py:\d+ in test_next|notes\.py:\d+ in note)"  # in `time.sleep`, or just before
    assert re.search(rf"test_end\.py::test_next was running:\n  rank 0: {place}\n  rank 1: {place}\n", output)
    assert "1 passed" in output
    assert [len(project.pids("wide-torn-down", rank)) for rank in (0, 1)] == [1, 1]
    project.assert_nothing_is_left()


def test_ctrl_c_reaches_a_rank_that_waits_for_its_turn(project: Project) -> None:
    project.copy("ahead")
    process = project.start("test_end.py::test_ends_on_one", "test_end.py::test_next")
    project.wait_for(lambda: project.pids("waits", rank=1), "rank 1 waits")
    time.sleep(0.5)  # until the other one has ended its test
    output = project.interrupt(process, signal.SIGINT)
    assert "test_end.py::test_ends_on_one was running:\n  rank 0: has ended the test\n" in output
    assert project.pids("begun") == []
    assert [len(project.pids("wide-torn-down", rank)) for rank in (0, 1)] == [1, 1]
    project.assert_nothing_is_left()


def test_exitfirst_counts_what_only_the_comparison_of_ranks_shows(project: Project) -> None:
    project.copy("ahead")
    output = project.run("-x", "test_end.py::test_disagrees", "test_end.py::test_next")
    assert "ranks disagree" in output
    assert "1 failed" in output
    assert project.pids("begun") == []


def test_a_plugin_may_change_the_list_of_tests(project: Project) -> None:
    project.copy("ahead")
    names = ["test_removes", "test_removed", "test_stays", "test_adds", "test_added"]
    output = project.run("-v", *(f"test_changed.py::{name}" for name in names))
    ran = [line.split()[0].split("::")[1] for line in output.splitlines() if " PASSED " in line]
    assert ran == ["test_removes", "test_stays", "test_adds", "test_added"]
    # The one that was removed had begun, so its world ended; one world served the others.
    assert len(project.pids("wide-set-up")) == len(project.pids("wide-torn-down")) == 2


@pytest.mark.parametrize("options", [["-s"], ["--capture=tee-sys"], ["--rank-pdb=1"]])
def test_nothing_runs_ahead_where_ranks_talk_to_the_user(project: Project, options: list[str]) -> None:
    project.copy("ahead")
    chosen = ["test_run.py::test_first", "test_run.py::test_second"]
    project.run(*options, *chosen, environ={"HOLD_FOR": "0.5"})
    assert (project.path / "held.txt").read_text() == "test_first False\n"
