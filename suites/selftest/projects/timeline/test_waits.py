"""Ranks that wait without end, with more than one collective in flight, or after other groups."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_several_in_flight(world):
    if world.rank == 0:
        first = dist.all_reduce(torch.ones(1), async_op=True)
        dist.all_reduce(torch.ones(2), async_op=True)
        first.wait()


@pytest.mark.ranks(3)
def test_two_groups_of_one_name(world):
    for begins_again in (True, False):
        group = dist.new_group([0, 1])
        if world.rank < 2:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        if begins_again:
            world.rebuild()
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    elif world.rank == 1:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_the_first_case_differs(world, run_subtests):
    def claim(case):
        if (case, world.rank) == (0, 1):
            dist.barrier()
        for _ in range(5):
            dist.all_reduce(torch.ones(1))

    run_subtests({"case": range(3)}, claim)
