"""State of a rank that is restored where torch's test utilities forbid to assign it."""

from __future__ import annotations

import os

import pytest

from lockstep.rank.state import RankState
from suites.selftest.project import Project

# As `torch.testing._internal.common_utils` does when it is imported: from then on flags of
# `torch.backends` cannot be assigned, for good.
FROZEN = """
import os, torch

torch.backends.disable_global_flags()


def test_touches_the_environment(world):
    os.environ["LEFT"] = "1"


def test_calls_set_flags(world):
    assert "LEFT" not in os.environ
    torch.backends.cudnn.set_flags(_benchmark=True, _deterministic=True)


def test_sees_nothing_of_it(world):
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.deterministic
"""


def test_flags_that_cannot_be_assigned_are_restored(project: Project) -> None:
    project.write(FROZEN)
    output = project.run()
    assert "3 passed, 2 warnings" in output
    assert "test left behind environ: LEFT" in output
    assert "test left behind cudnn flags: (True, True) (was (False, False))" in output


@pytest.mark.parametrize("name", ["PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_pytest_and_torch_set_by_themselves_is_no_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = RankState.capture().environ
    monkeypatch.setenv(name, "set in a test")
    monkeypatch.setenv("OF_A_USER", "set in a test")
    assert {*RankState.capture().environ} - {*before} == {os.fsencode("OF_A_USER")}


def test_a_group_that_is_gone_after_a_failure_is_not_reported(project: Project) -> None:
    """The harness aborts the groups of a rank that fails, and torch forgets those of nccl."""
    project.write("""
import torch.distributed as dist

def test_fails(world):
    dist.destroy_process_group()
    assert False

def test_after(world):
    world.barrier()
""")
    output = project.run()
    assert "1 failed, 1 passed in" in output
    assert "left behind" not in output


def test_what_a_file_changes_as_it_is_imported_stands(project: Project) -> None:
    project.write("""
import os
os.environ["OF_A_FILE"] = "1"

def test_first(world):
    os.environ["OF_A_TEST"] = "1"

def test_second(world):
    assert os.environ["OF_A_FILE"] == "1"
    assert "OF_A_TEST" not in os.environ
""")
    output = project.run()
    assert "2 passed, 1 warning" in output
    assert "the test left behind environ: OF_A_TEST\n" in output
