"""Classes of the kind of DeepSpeed's `DistributedTest`, run unchanged on ranks."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lockstep.features.adopt.modules import restored
from suites.selftest.adopt.verdicts import of_class
from suites.selftest.project import Project

PROJECT = "adopt/distributed_test"
INI = "ranks_adopt = deepspeed\nmarkers = world_size(n): launch a test with n processes"


@pytest.mark.parametrize("name", ["Passing", "Reusing", "NotInitialised", "NoEnvironment"])
def test_each_form_of_distributed_test_passes(verdicts: dict[str, str], name: str) -> None:
    assert set(of_class(verdicts, f"Test{name}").values()) == {"passed"}


def test_a_list_of_world_sizes_is_an_item_for_each(verdicts: dict[str, str]) -> None:
    found = of_class(verdicts, "TestSizes")
    assert found == {"test_sum[1-rank]": "passed", "test_sum[2-ranks]": "passed"}


def test_a_loop_over_world_sizes_launches_the_one_of_the_item(verdicts: dict[str, str]) -> None:
    looped = of_class(verdicts, "TestLoopOverSizes")
    failure = looped.pop("test_of_one[2-ranks]")
    assert failure in {f"failure: rank {rank}: assert 2 == 1" for rank in (0, 1)}  # both fail
    passed = ("test_sum[1-rank]", "test_sum[2-ranks]", "test_of_one[1-rank]")
    assert looped == dict.fromkeys(passed, "passed")
    of_one = of_class(verdicts, "TestLaunchesOneOfItsSizes")
    assert of_one["test_sum[1-rank]"] == "passed"
    assert "did not launch the 2 processes" in of_one["test_sum[2-ranks]"]


def test_skips_keep_their_reason_and_must_be_of_all(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestSkipping") == {
        "test_mark": "skipped: not today",
        "test_all": "skipped: on all ranks",
        "test_one": "failure: rank 1: ranks disagree",
    }
    accelerator = of_class(verdicts, "TestNeedsAccelerator")
    assert accelerator == {"test_nothing": "skipped: only with an accelerator"}


def test_a_failed_distributed_test_names_its_rank(verdicts: dict[str, str]) -> None:
    assert of_class(verdicts, "TestFailing") == {
        "test_1_one_rank": "failure: rank 1: assert 1 == 0",
        "test_2_under_collective": "failure: rank 1: ValueError: of rank 1",
        "test_3_then": "passed",
    }


def test_a_death_or_a_hang_ends_one_distributed_test(verdicts: dict[str, str]) -> None:
    dying, hanging = (of_class(verdicts, name) for name in ("TestDying", "TestHanging"))
    assert dying == {"test_1_killed": "failure: rank 1: died: SIGKILL", "test_2_then": "passed"}
    # Rank 1 has left the test, and is in the barrier of `_dist_destroy`.
    differ = "rank 0 is in all_reduce #1 (long [1]) while rank 1 is in barrier #1"
    assert hanging["test_1_one_waits"] == f"failure: mismatch: {differ}"
    assert hanging["test_2_then"] == "passed"


def test_what_launches_in_its_own_way_is_left_alone(project: Project) -> None:
    project.copy("adopt/distributed_test", "markers = world_size(n): launch a test with n processes")
    output = project.run(
        "--ranks-adopt=deepspeed", "--ranks-adopt-report", "-k", "LauncherOf or AfterFixture"
    )
    assert "TestLauncherOfItsOwn has a launcher of its own: it overrides _launch_procs" in output
    assert "its fixture written_by_two is a DistributedFixture, which starts processes itself" in output
    assert "2 passed" in output


def test_variables_of_modules_are_put_back() -> None:
    names = ("lockstep_sample", "lockstep_sample.part", "lockstep_samples")
    package, part, other = modules = [ModuleType(name) for name in names]
    known = [1, 2]
    package.backend, part.known, part.table, other.value = None, known, {"a": 1}, 1
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)
        with restored("lockstep_sample"):
            package.backend, package.new, other.value = "gloo", 1, 2
            known.append(3)
            part.table.clear()
    assert (package.backend, hasattr(package, "new"), part.known) == (None, False, [1, 2])
    assert (part.known is known, part.table, other.value) == (True, {"a": 1}, 2)
