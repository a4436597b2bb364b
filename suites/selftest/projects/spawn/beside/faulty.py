"""Tests that fail by what `--skew` finds, and by a hang that has a timeline."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_one import join_group


def race(rank):
    join_group(rank)
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.add_(1)
    work.wait()


def test_race():
    mp.spawn(race, nprocs=2)


def leave_one_out(rank):
    join_group(rank)
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def test_hang():
    mp.spawn(leave_one_out, nprocs=2)


def test_not_run():
    mp.spawn(race, nprocs=2)
