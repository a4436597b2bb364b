"""Collectives that ranks do not issue alike, and process groups that are gone."""

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from healthy import test_healthy as test_healthy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine import FullyShardedDataParallel, fully_shard

pytestmark = pytest.mark.ranks(2, timeout=30)


def test_order(world):
    tensor = torch.ones(3)
    steps = [lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)]
    for step in steps if world.rank == 0 else reversed(steps):
        step()


def test_one_missing(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.barrier()


class Disagrees(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.environ["RANK"] == "1":
            dist.all_reduce(grad.clone())
        else:
            dist.all_gather([torch.empty_like(grad) for _ in range(2)], grad)
        return grad


def test_receive(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.recv(torch.ones(3), 0)


def test_operation_in_backward(world):
    Disagrees.apply(torch.ones(3, requires_grad=True)).sum().backward()


def test_one_missing_in_backward(world):
    x = torch.ones(3, requires_grad=True)
    if world.rank == 1:
        x.register_hook(lambda grad: dist.all_reduce(grad.clone()))  # a hook
    x.sum().backward()


def test_failure_in_backward(world):
    def hook(grad):
        if world.rank == 1:
            raise ValueError("in a hook")
        dist.all_reduce(grad.clone())

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skips):
        return self.first(x) if skips else self.second(self.first(x))


def test_ddp_with_an_unused_parameter(world):
    model = DistributedDataParallel(Layers())
    for _ in range(2):
        model(torch.ones(2, 4), skips=world.rank == 1).sum().backward()


def test_engine_with_a_skipped_unit(world):
    model = Layers()
    model.first, model.second = map(FullyShardedDataParallel, (model.first, model.second))
    model = FullyShardedDataParallel(model)
    for _ in range(2):
        model(torch.ones(2, 4), skips=world.rank == 1).sum().backward()


class Detaches(Layers):
    def forward(self, x, skips):
        hidden = self.first(x)
        return self.second(hidden.detach() if skips else hidden)


def test_engine_without_a_gradient_in_a_unit(world):
    model = Detaches()
    fully_shard(model.first)  # of the size of the other: each may meet collectives of that
    fully_shard(model.second)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 4), skips=world.rank == 1).sum().backward()


def test_two_groups_in_opposite_order(world):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups[:: 1 - 2 * world.rank]:
        dist.all_reduce(torch.ones(1), group=group)


def test_patient(world):
    # They wait for each other, and not for nothing: an operation of each is in flight all the time.
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = []
    for group in groups[:: 1 - 2 * world.rank]:
        works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)
    for work in works:
        work.wait()


def test_timeout_of_a_group(world):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def test_threads_with_a_group_each(world):
    groups = [dist.new_group() for _ in range(2)]

    def late(number):
        threading.Event().wait(2 if number == world.rank else 0)
        dist.all_reduce(torch.ones(1), group=groups[number])

    threads = [threading.Thread(target=late, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_sleep_with_work_in_flight(world):
    groups = [dist.new_group() for _ in range(2)]
    work = dist.all_reduce(torch.ones(1), group=groups[world.rank], async_op=True)
    time.sleep(2)
    dist.all_reduce(torch.ones(1), group=groups[1 - world.rank])
    work.wait()


@pytest.mark.ranks(3)
def test_outside_of_a_group(world):
    dist.new_group([0, 1])
    if world.rank == 0:
        dist.barrier()


def test_cases(world, run_subtests):
    def claim(n):
        if (world.rank, n) != (0, 2):
            dist.all_reduce(torch.ones(n))

    run_subtests({"n": [1, 2, 3]}, claim)


def test_rescue_in_a_case(world, run_subtests):
    def claim(n):
        if n != 2:
            world.barrier()
        elif world.rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(5))

    run_subtests({"n": [1, 2, 3]}, claim)


def test_mismatch_in_a_case(world, run_subtests):
    def claim(n):
        if world.rank == 0 or n != 2:
            dist.all_reduce(torch.ones(n))
        else:
            dist.broadcast(torch.ones(n), 0)

    run_subtests({"n": [1, 2, 3]}, claim)


def test_one_missing_after_cases(world, run_subtests):
    run_subtests({"n": [1, 2]}, lambda n: world.barrier())
    if world.rank == 1:
        dist.all_reduce(torch.ones(6))


def test_group_destroyed_before_a_collective(world):
    if world.rank == 1:
        dist.destroy_process_group()
    dist.barrier()


def test_group_destroyed_at_the_end(world):
    if world.rank == 1:
        dist.destroy_process_group()


def test_group_destroyed_by_all(world):
    dist.destroy_process_group()
