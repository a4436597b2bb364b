"""`--ranks-adopt-cpu`: adopted tests for accelerators, on gloo and the CPU. And their environment."""

from __future__ import annotations

from pathlib import Path

from lockstep.features.adopt.cpu import PATCHES
from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "adopt_pytorch.md"


def test_tests_for_gpus_run_as_if_there_were_four(project: Project) -> None:
    project.copy("adopt/cpu", "ranks_adopt = torch")
    verdicts = verdicts_of(project, "--ranks-adopt-cpu", "-W", "ignore")
    too_few = {"TestSharded.test_eight": "skipped: Need at least 8 CUDA devices"}
    in_threads = {"TestThreads.test_in_threads": "skipped: Need at least 2 CUDA devices"}
    passed = [
        *(f"TestSharded.test_{name}" for name in ("fsdp", "fully_shard", "ddp", "names_of_devices")),
        "TestSize.test_four",
        "TestKeptGroup.test_fully_shard",
        "TestOnlyCPU.test_device_cpu",
        "TestMesh.test_backend",
        "test_devices.test_plain_ranks_see_the_machine",
    ]
    assert verdicts == dict.fromkeys(passed, "passed") | too_few | in_threads


def test_without_the_option_they_skip_as_torchs_do(project: Project) -> None:
    project.copy("adopt/cpu", "ranks_adopt = torch")
    verdicts = verdicts_of(project, "-W", "ignore", "-k", "TestSharded or TestSize or TestOnly")
    assert {said.partition(":")[0] for said in verdicts.values()} == {"skipped"}
    assert not any(name.startswith("TestOnly") for name in verdicts)


def test_adopted_tests_see_the_environment_of_torchs_children(project: Project) -> None:
    project.copy("adopt/environment", "ranks_adopt = torch")
    assert set(verdicts_of(project, "-W", "ignore").values()) == {"passed"}


def test_the_page_names_each_patch() -> None:
    page = DOCS.read_text()
    assert [patch.name for patch in PATCHES if f"`{patch.name.partition(':')[2]}`" not in page] == []
