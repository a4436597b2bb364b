"""Classes of torch's `MultiProcessTestCase`, run unchanged on ranks.

`TORCH` has the verdicts of torch's own launcher on the same file where they differ, as `pytest` without the
option gave them with torch 2.13.
"""

from __future__ import annotations

import re

import pytest

from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project

PROJECT = "adopt/multi_process"
NO_CUDA = "skipped: CUDA is not available."
ASSERTION = "failure: rank 1: AssertionError: Scalars are not equal!"

OURS = {
    "TestPassing.test_cleanup": "passed",
    "TestPassing.test_group": "passed",
    "TestPassing.test_group_again": "passed",
    "TestPassing.test_no_process_group_of_the_rank": "passed",
    "TestPassing.test_parameters_size_1": "passed",
    "TestPassing.test_parameters_size_2": "passed",
    "TestPassing.test_seed": "passed",
    "TestPassing.test_subtests": "passed",
    "TestDTensor.test_1_mesh": "passed",
    "TestDTensor.test_2_fails": ASSERTION,
    "TestDTensor.test_3_then": "passed",
    "TestFsdp.test_needs_gpus": "skipped: Need at least 2 CUDA devices",
    "TestOfBase.test_pg": "passed",
    "TestOfBase.test_pg_again": "passed",
    "TestDynamo.test_no_process": "skipped: world_size is 0: torch would start no process, and run nothing",
    "TestOfDevicesCPU.test_device_cpu": "passed",
    "TestSkipping.test_decorated": "skipped: not today",
    "TestSkipping.test_gpus": "skipped: Need at least 2 CUDA devices",
    "TestSkipping.test_in_body": "skipped: in the body",
    "TestSkipping.test_mpi": "skipped: c10d was not compiled with the MPI backend",
    "TestSkipping.test_on_rank_0": "skipped: on one",
    "TestSkipping.test_on_rank_1": NO_CUDA,
    "TestSkipping.test_skip_and_failure": "failure: rank 1: ValueError: of rank 1",
    "TestSkippingSetUp.test_x": "skipped: in setUp",
    "TestStartingNothing.test_x": "skipped: its setUp started no process, so nothing ran",
    "TestFailing.test_1_one_rank": ASSERTION,
    "TestFailing.test_2_all": "failure: rank N: AssertionError: Scalars are not equal!",
    "TestFailing.test_3_under_collective": "failure: rank 1: ValueError: of rank 1",
    "TestFailing.test_4_in_subtest": "failure: rank N: AssertionError: 1 not less than 1",
    "TestFailing.test_5_then": "passed",
    "TestFailingTearDown.test_x": "failure: rank N: ValueError: of tearDown",
    "TestEnding.test_1_exit_0_of_one": "failure: rank 1: Failed: exited with 0 before its end",
    "TestEnding.test_2_exit_0_of_all": "failure: rank N: Failed: exited with 0 before its end",
    "TestEnding.test_3_exit_3_of_one": "failure: rank 1: Failed: exited with 3 before its end",
    "TestEnding.test_4_killed": "failure: rank 1: died: SIGKILL",
    "TestEnding.test_5_killed_under_collective": "failure: rank 1: died: SIGKILL",
    "TestEnding.test_6_gone": "failure: rank 1: exited with code 0",
    "TestEnding.test_7_then": "passed",
    "TestHanging.test_1_one_waits": "failure: rank 0 waits in all_reduce #2 (float [1]), which rank 1 never "
    "reached: it has ended the test",
    "TestHanging.test_2_then": "passed",
    "TestExpecting.test_all": "skipped: ",
    "TestExpecting.test_one_rank": "skipped: ",
    "TestExpecting.test_unexpected": "failure: rank N: Failed: Unexpected success",
    "TestState.test_1_changes": "passed",
    "TestState.test_2_finds_none": "passed",
}
"""The verdicts, and for failures the cause; N where it may be either rank's."""


TORCH = {
    "TestDynamo.test_no_process": "passed",
    "TestStartingNothing.test_x": "passed",
    "TestSkipping.test_on_rank_1": "passed",
    "TestEnding.test_1_exit_0_of_one": "passed",
    "TestEnding.test_2_exit_0_of_all": "passed",
    "TestEnding.test_3_exit_3_of_one": "passed",
    "TestEnding.test_4_killed": "passed",
    "TestEnding.test_6_gone": "passed",
}
"""Torch starts no process, or looks at the exit code of rank 0 alone and takes 0 for the end of the test."""


@pytest.mark.parametrize("name", OURS)
def test_the_verdict_on(verdicts: dict[str, str], name: str) -> None:
    expected = re.escape(OURS[name]).replace("rank\\ N", "rank\\ [01]")
    assert re.fullmatch(expected, verdicts[name]), verdicts[name]


def test_torch_differs_where_its_verdict_is_wrong() -> None:
    """By hand: torch passes a test that ran nothing, and overlooks how the other ranks ended."""
    assert all(OURS[name].startswith(("failure", "skipped")) for name in TORCH)


def test_no_test_is_missing(verdicts: dict[str, str]) -> None:
    assert verdicts.keys() == OURS.keys()


def test_own_launchers_keep_their_verdicts(project: Project) -> None:
    project.copy("adopt/own_processes", "ranks_adopt = torch")
    assert verdicts_of(project) == {
        "TestCodes.test_any": "passed",
        "TestCodes.test_code_wrong": "failure: rank 0: AssertionError: Scalars are not equal!",
        "TestLauncherOfItsOwn.test_x": "passed",
        "TestThreads.test_x": "passed",
    }
