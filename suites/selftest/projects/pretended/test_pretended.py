import os

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_all_reduce(world):
    assert (world.device, world.backend) == (torch.device("pretended", world.rank), "pccl")
    assert torch.pretended.current_device() == world.rank
    sum = torch.full((4,), world.rank + 1.0, device=world.device)
    dist.all_reduce(sum)
    assert sum.tolist() == [3.0] * 4
    world.barrier()
    assert world.mesh().device_type == "pretended"
    assert world.gather(world.rank) == [0, 1]


@pytest.mark.ranks(2)
def test_one_rank_fails(world):
    assert world.rank == 0


@pytest.mark.ranks(2)
def test_one_rank_dies(world):
    if world.rank == 0:
        os._exit(3)
    world.barrier()


@pytest.mark.ranks(4)
def test_four_ranks(world):
    pass
