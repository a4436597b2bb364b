"""Code that reads the launcher's environment."""

import os

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("run", range(4))
def test_groups_from_the_environment_meet(run):
    dist.destroy_process_group()
    for _ in range(3):
        dist.init_process_group("gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert int(tensor) == 2
        dist.destroy_process_group()
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    dist.barrier()


def test_a_group_of_one_rank_meets_no_one(world):
    dist.destroy_process_group()
    if world.rank == 0:
        dist.init_process_group("gloo", rank=0, world_size=1)
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()


def test_a_test_may_listen_at_the_port(world):
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for _ in range(2):
        store = dist.TCPStore(*address, world.size, is_master=world.rank == 0)
        store.set(str(world.rank), "here")
        assert store.get(str(1 - world.rank)) == b"here"
        world.barrier()
        del store
        world.barrier()
