"""A test whose ranks all have aborted their group, and the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suites.selftest.project import Project


def test_a_fault_on_all_ranks_that_is_expected_costs_the_next_test_nothing(project: Project) -> None:
    project.write("""
import torch, torch.distributed as dist

def test_all_fail(world, faults):
    faults.fail(before="all_reduce")
    with faults.expect("InjectedFault"):
        dist.all_reduce(torch.ones(2))

def test_next(world):
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2]
""")
    for backend in ("gloo", "shm"):
        assert "2 passed" in project.run("--backend", backend)
