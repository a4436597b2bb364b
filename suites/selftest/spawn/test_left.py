"""Processes that tests leave: they are ended, and each is in a sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from suites.selftest.adopt.verdicts import verdicts_of

if TYPE_CHECKING:
    from suites.selftest.project import Project, Run

PROJECT = "spawn/left"
OPTIONS = ("--ranks-adopt=spawn",)
ENVIRON = {"COLUMNS": "300"}
SAID = {
    "test_running": r"process \d+ \(SpawnProcess-\d+, `wait`\), which was running and was ended",
    "test_context": r"process \d+ \(SpawnProcess-\d+, `wait_of_rank`\), which was running and was ended",
    "test_unseen": r"process \d+ \(SpawnProcess-\d+, `fail`\), which exited with code 1; the test did not",
    "test_child": r"process \d+ \(sleep 1000\), which was ended",
    "test_nested": r"process \d+ \(started by a process of the test\), which was ended",
    "test_on_rank": r"process \d+ \(started by a process of the test\), which was ended",
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_left_is_in_a_warning(run: Run, name: str) -> None:
    said = re.search(rf"test_left.py::{name}\n(.*)\n", run.output)
    assert said is not None
    assert re.search(f"the test left behind .*{SAID[name]}", said[1])


def test_nothing_fails_for_what_it_leaves(run: Run) -> None:
    assert {name for name in run.cases if run.outcome(name) != "passed"} == set()
    assert run.output.count("RankLeakWarning") == len(SAID)


def test_as_errors_they_are_of_those_tests_alone_and_nothing_stays(project: Project) -> None:
    project.copy(PROJECT, "ranks_adopt = spawn\nranks_leaks = error")
    project.fresh = True  # in forks of a warm interpreter three of the tests passed
    found = verdicts_of(project)
    assert {name for name, said in found.items() if said != "passed"} == {
        f"test_left.{name}" for name in SAID
    }
    assert len(found) == 15
    project.assert_nothing_is_left()
