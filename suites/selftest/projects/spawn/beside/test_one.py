"""Calls of spawn at one port, in two files: beside each other under `pytest -n`."""

import os

import library
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def join_group(rank):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=2)


def reduce(rank):
    join_group(rank)
    total = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(total)
    assert total.item() == 8
    library.on_a_warm_rank(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("time", [1, 2, 3])
def test_port(time):
    mp.spawn(reduce, nprocs=2)


@pytest.mark.own_processes
def test_processes():
    mp.spawn(library.in_its_own_process, nprocs=2)
