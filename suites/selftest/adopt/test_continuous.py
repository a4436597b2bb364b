"""Classes of torch's `MultiProcContinuousTest`, run unchanged on ranks."""

from __future__ import annotations

import pytest

from suites.selftest.adopt.verdicts import of_class, verdicts_of
from suites.selftest.project import Project

PROJECT = "adopt/continuous"
NO_CUDA = "skipped: CUDA is not available."


FORMS = "Passing Another Parametrized OfDevicesCPU DTensor SizeProperty"
FORMS_OF_DEVICE = "DeviceProperty DeviceString DeviceFunction"


@pytest.mark.parametrize("name", [*FORMS.split(), *FORMS_OF_DEVICE.split()])
def test_each_form_of_class_passes(verdicts: dict[str, str], name: str) -> None:
    assert set(of_class(verdicts, f"Test{name}").values()) == {"passed"}


def test_skips_by_decorator_exit_code_and_backend(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestSkipping") == {
        "test_1_decorated": "skipped: not today",
        "test_2_gpus": "skipped: Need at least 8 CUDA devices",
        "test_3_code": NO_CUDA,
        "test_4_code_on_one_rank": NO_CUDA,
        "test_5_then": "passed",
    }
    assert of_class(verdicts, "TestNoBackend") == {"test_sum": "skipped: Backend 'mpi' is not available"}


def test_an_exit_code_of_init_pg_skips_each_test(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestSkippingInit") == {"test_1": NO_CUDA, "test_2": NO_CUDA}


def test_a_skip_in_the_body_counts_where_all_ranks_skip(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestSkipInBody")
    assert found["test_1_all"] == "skipped: in the body"
    assert found["test_2_one"] == "failure: rank 1: ranks disagree"


def test_a_failure_names_its_rank_and_the_next_test_runs(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestFailing")
    assert found == {
        "test_1_one_rank": "failure: rank 1: AssertionError: Scalars are not equal!",
        "test_2_then": "passed",
    }
    found = of_class(verdicts, "TestFailingUnderCollective")
    assert found == {"test_1_one_rank": "failure: rank 1: ValueError: of rank 1", "test_2_then": "passed"}


def test_an_expected_failure_is_one(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestExpecting")["test_1_expected"].startswith("skipped")


def test_an_exit_before_the_end_fails(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestExit")["test_1_zero"]
    assert found.endswith(": Failed: exited with 0 before its end")
    assert of_class(verdicts, "TestGone")["test_1_gone"] == "failure: rank 1: exited with code 0"


def test_a_death_names_the_signal_and_the_next_test_runs(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestKilled")
    assert found == {"test_1_killed": "failure: rank 1: died: SIGKILL", "test_2_then": "passed"}


def test_a_hang_is_ended_by_diagnosis_not_deadline(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestHanging")
    assert "rank 0 waits in all_reduce #1 (long [1])" in found["test_1_one_waits"]
    assert found["test_2_then"] == "passed"


def test_a_launcher_of_its_own_is_left_alone(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestLauncherOfItsOwn") == {"test_sum": "passed"}


def test_the_group_is_kept_while_another_class_runs(project: Project) -> None:
    project.copy("adopt/continuous")
    tests = ("TestPassing::test_2_names", "TestAnother::test_sum", "TestPassing::test_3_same_group")
    found = verdicts_of(project, "--ranks-adopt=torch", *(f"test_continuous.py::{name}" for name in tests))
    assert found == dict.fromkeys([name.replace("::", ".") for name in tests], "passed")
