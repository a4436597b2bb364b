"""Failures on ranks: shown, counted, listed and run again as pytest does elsewhere."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from suites.selftest.project import Project, Run, run_pytest

PROJECT = "failures"
OPTIONS = ("-v", "--tb=short", "--durations=3", "--durations-min=0", "--world-seed=7")
FAILED = ["test_exits", "test_fails", "test_is_interrupted"]


def test_every_item_has_one_line_in_verbose_output(run: Run) -> None:
    lines = re.findall(r"^test_\w+\.py::(\w+) ([A-Z]+)", run.output, re.MULTILINE)
    assert [name for name, _ in lines] == list(run.cases)
    assert sorted(name for name, word in lines if word == "FAILED") == FAILED


def test_exit_and_interrupt_in_a_rank_fail_their_test_only(run: Run) -> None:
    assert run.count() == "3 failed, 4 passed"
    assert "FAILED test_failures.py::test_exits - rank 1: _pytest.outcomes.Exit: enough" in run.output
    assert "FAILED test_failures.py::test_is_interrupted - rank 0: KeyboardInterrupt" in run.output
    assert "rank 0: lost its connection to rank 1 at" in run.failure("test_exits")


def test_the_xml_report_has_one_case_an_item_and_names_the_rank(run: Run) -> None:
    assert len(list(run.suite.iter("testcase"))) == len(run.cases) == 7
    case = run.case("test_fails")
    assert case.attrib["classname"] == "test_failures"
    assert case.findall("failure")[0].get("message", "").startswith("rank 1: assert 1 == 0")
    assert float(case.attrib["time"]) > 0


def test_a_short_traceback_is_short(run: Run) -> None:
    text = run.failure("test_fails")
    assert re.search(r"^test_failures.py:\d+: in test_fails$", text, re.MULTILINE)
    assert "def test_fails" not in text


def test_durations_are_listed(run: Run) -> None:
    assert len(re.findall(r"^\d+\.\d+s (?:setup|call|teardown) +test_", run.output, re.MULTILINE)) == 3


def test_the_seed_is_in_the_report_and_in_the_re_run_line(run: Run) -> None:
    assert "re-run (seed 7)" in run.output
    assert "\npytest test_failures.py::test_fails --world-seed 7\n" in run.output


@pytest.fixture(scope="module")
def again(run: Run) -> Run:
    """The line that runs a failure again, with other ways to show it."""
    program, *args = shlex.split(re.findall(r"^pytest .*::test_fails.*$", run.output, re.MULTILINE)[0])
    assert program == "pytest"
    shown = ("--tb=native", "--debug", "--capture=tee-sys")
    return run_pytest(run.path, *args, "-p", "no:cacheprovider", *shown)


def test_the_re_run_line_runs_the_failure_again(again: Run) -> None:
    assert again.count() == "1 failed"
    assert "re-run (seed 7)" in again.output


def test_a_native_traceback_and_the_debug_log_are_complete(again: Run) -> None:
    assert "FAILED test_failures.py::test_fails - rank 1: assert 1 == 0\n" in again.output
    assert "\0" not in (again.path / "pytestdebug.log").read_text()


def test_ranks_print_live_on_request(again: Run) -> None:
    live, _, report = again.output.partition("= FAILURES =")
    assert sorted(re.findall(r"said by (\d)\n", live)) == ["0", "1"]
    assert re.findall(r"said by (\d)\n", report) == ["1"]


PRINTS = "def test_prints(world):\n    print(f'of rank {world.rank}')\n    assert world.rank == 0\n"


@pytest.mark.parametrize(("shown", "ranks"), [("failed", ["1"]), ("all", ["1", "0"]), ("none", [])])
def test_output_is_shown_of_the_ranks_that_are_asked_for(
    project: Project, shown: str, ranks: list[str]
) -> None:
    project.write(PRINTS)
    output = project.run(f"--rank-output={shown}")
    assert re.findall(r"^-+ Captured stdout call \(rank (\d)\) -+$", output, re.MULTILINE) == ranks
    assert re.findall(r"^of rank (\d)$", output, re.MULTILINE) == ranks


def test_last_failed_runs_only_what_failed(run: Run) -> None:
    cache = run.path / ".pytest_cache/v/cache/lastfailed"
    ids = [f"test_failures.py::{name}" for name in FAILED]
    assert sorted(json.loads(cache.read_text())) == ids
    again = run_pytest(run.path, "--lf", "-q", "--tb=line", "-s")
    assert again.count() == "3 failed"
    assert sorted(json.loads(cache.read_text())) == ids
    assert re.search(r"^/.*/test_failures.py:\d+: rank 1: assert 1 == 0$", again.output, re.MULTILINE)
    assert sorted(re.findall(r"said by (\d)", again.output)) == ["0", "1"]
