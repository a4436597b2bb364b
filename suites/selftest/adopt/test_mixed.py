"""Adopted classes among other tests: the verdicts do not depend on what else runs, or on the order."""

from __future__ import annotations

import pytest

from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project

FAILURES = {
    "TestTwo.test_fails": "failure: rank 1: ValueError: of rank 1",
    "TestContinuous.test_fails": "failure: rank 1: AssertionError: Scalars are not equal!",
}
VERDICTS = FAILURES | {
    "TestTwo.test_total": "passed",
    "TestTwo.test_state": "passed",
    "TestTwo.test_expected": "skipped: ",
    "TestThree.test_total": "passed",
    "TestContinuous.test_total": "passed",
    "TestContinuous.test_again": "passed",
    "TestThreads.test_size": "passed",
    "test_mixed.test_on_ranks": "passed",
    "test_mixed.test_without_ranks": "passed",
}


@pytest.fixture
def mixed(project: Project) -> Project:
    project.copy("adopt/mixed", "ranks_adopt = torch")
    return project


def test_workers_and_reused_groups_change_no_verdict(mixed: Project) -> None:
    assert verdicts_of(mixed, "-n2", "-pxdist", "-oranks_adopt_groups=reuse") == VERDICTS


@pytest.mark.parametrize(("groups", "order"), [("own", "reversed"), ("reuse", "shuffled")])
def test_ranks_on_shm_and_the_order_change_no_verdict(mixed: Project, groups: str, order: str) -> None:
    options = (f"-oranks_adopt_groups={groups}", f"--order={order}")
    assert verdicts_of(mixed, "--backend=shm", *options) == VERDICTS


def test_adopted_tests_are_skipped_in_fake_worlds(mixed: Project) -> None:
    """They need what their peers send, as all tests do that do not say otherwise."""
    found = verdicts_of(mixed, "--backend=fake", "-k", "TestTwo or TestContinuous")
    assert len(found) == 7
    sentence = (
        "skipped: the test needs that a rank receives what the others have sent, which fake does not offer"
    )
    assert {name: said for name, said in found.items() if said != sentence} == {}


@pytest.mark.parametrize("groups", ["own", "reuse"])
def test_a_hang_is_numbered_from_its_own_test_on(project: Project, groups: str) -> None:
    project.copy("adopt/numbers", f"ranks_adopt = torch\nranks_adopt_groups = {groups}")
    first, second = (
        f"failure: rank {one} waits in all_reduce #{number} (float [1]), "
        f"which rank {1 - one} never reached: it has ended the test"
        for one, number in [(0, 3), (1, 2)]
    )
    assert verdicts_of(project) == {
        "TestOwn.test_four": "passed",
        "test_numbers.test_on_ranks_hangs": first,
        "TestKept.test_1_four": "passed",
        "TestKept.test_2_hangs": second,
    }


def test_a_selection_changes_no_verdict(mixed: Project) -> None:
    chosen = {name: said for name, said in VERDICTS.items() if name.endswith("total")}
    assert verdicts_of(mixed, "-k", "total") == chosen


def test_the_first_failure_ends_the_run(mixed: Project) -> None:
    found = verdicts_of(mixed, "-x", "--order=reversed")
    assert found == {name: said for name, said in VERDICTS.items() if name in found}
    assert [name for name in found if name in FAILURES] == ["TestContinuous.test_fails"]


def test_the_command_that_runs_a_test_again_adopts_it_too(project: Project) -> None:
    project.copy("adopt/mixed")
    output = project.run("--ranks-adopt=torch", "-k", "TestTwo and fails")
    assert " --ranks-adopt torch" in output


def test_the_last_failures_run_again(mixed: Project) -> None:
    assert verdicts_of(mixed, "-pcacheprovider") == VERDICTS
    assert verdicts_of(mixed, "-pcacheprovider", "--lf") == FAILURES


def test_the_summary_counts_what_is_left(mixed: Project) -> None:
    counts = "ranks_adopt: 1 test of 1 class left to their own launcher (--ranks-adopt-report says why)"
    assert counts in mixed.run("--collect-only").splitlines()
    lines = mixed.run("--ranks-adopt-report", "-n2", "-pxdist", "-k", "Threads or again").splitlines()
    assert "test_mixed.py::TestContinuous: 1 test on ranks" in lines
    reason = "left to its own launcher: its ranks are threads of one process"
    assert f"test_mixed.py::TestThreads: 1 test {reason}" in lines


def test_without_the_option_nothing_is_adopted(project: Project) -> None:
    project.copy("adopt/mixed")
    output = project.run("-k", "TestThree", "-rA", "-v")
    assert "PASSED test_mixed.py::TestThree::test_total" in output
    assert "ranks_adopt" not in output


# A class with a base, whose file may not start the server of the ranks: children of this process.
UNRELATED = """
import os, pathlib, sys, unittest

class TestPlain(unittest.TestCase):
    def test_nothing_is_loaded(self):
        assert "torch" not in sys.modules
        assert not pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text()
"""


def test_the_option_costs_other_projects_nothing(project: Project) -> None:
    (project.path / "test_plain.py").write_text(UNRELATED)
    project.write_ini("ranks_adopt = torch deepspeed")
    project.fresh = True
    assert verdicts_of(project) == {"TestPlain.test_nothing_is_loaded": "passed"}


def test_an_unknown_kind_is_refused(mixed: Project) -> None:
    output = mixed.run("--ranks-adopt=horovod")
    assert "ERROR: ranks_adopt: unknown kind 'horovod'; there are torch, deepspeed" in output


def test_the_option_for_cpus_needs_tests_of_torch(project: Project) -> None:
    project.write("")
    output = project.run("--ranks-adopt-cpu")
    assert "ERROR: --ranks-adopt-cpu: add --ranks-adopt torch, whose tests it is for" in output
