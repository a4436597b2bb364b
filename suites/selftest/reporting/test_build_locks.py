"""Locks of torch's C++ builds: killed with its rank, a build leaves one, for which all later builds wait."""

from __future__ import annotations

from suites.selftest.project import Project

TESTS = """
import time
from pathlib import Path

import torch.utils.cpp_extension
from torch.utils.file_baton import FileBaton

LOCK = str(Path(__file__).parent / "lock")


@pytest.mark.ranks(2, timeout=3)
def test_build(world):
    baton = FileBaton(LOCK)  # as torch's _jit_compile does
    if world.rank == 0:
        assert baton.try_acquire()
    world.barrier()
    if world.rank == 0:
        time.sleep(60)
    else:
        baton.wait()


@pytest.mark.ranks(2, timeout=3)
def test_later(world):
    baton = FileBaton(LOCK)
    if not baton.try_acquire():
        baton.wait()
"""


def test_a_lock_that_a_killed_build_leaves_is_named_then_and_later(project: Project) -> None:
    project.write(TESTS)
    output = project.run("--world-timeout=3")
    lock = project.path / "lock"
    assert lock.exists()
    built, later = output.split("_ test_later _")
    left = (
        f"rank 0 was building a C++ extension, and torch's lock {lock} stays: every later build there waits"
    )
    assert f"{left} for it; remove it: rm {lock}\n" in built
    waits = f"waits for torch's lock {lock}, which no rank of this test holds: unless another process is"
    assert later.count(f"{waits} building now, remove it: rm {lock}\n") == 1
    assert "which no rank of this test holds" not in built
