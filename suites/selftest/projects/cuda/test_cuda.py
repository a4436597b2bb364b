"""Tests on GPUs, of one rank on nccl or of two that share a GPU on gloo."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(int(os.environ["SIZE"]), timeout=30)


def reduce(world):
    tensor = torch.full((4,), world.rank + 1.0, device=world.device)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 4


def index_out_of_bounds(world):
    torch.zeros(3, device=world.device)[torch.tensor([5], device=world.device)]


def test_reduces(world):
    assert (world.device.type, torch.cuda.current_device()) == ("cuda", world.device.index)
    reduce(world)


def test_queues_an_error(world):
    if world.rank == 0:
        index_out_of_bounds(world)


def test_after_the_error(world):
    reduce(world)


def test_sees_its_error(world):
    index_out_of_bounds(world)
    torch.cuda.synchronize()


def test_after_its_error(world):
    reduce(world)


def test_queues_a_second(world):
    torch.ones(1, device=world.device)
    torch.cuda._sleep(2_000_000_000)


def test_does_not_wait_for_it(world):
    assert torch.cuda.current_stream().query()  # nothing is queued any more


def test_is_killed(world):
    reduce(world)
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_the_death(world):
    reduce(world)


def test_has_no_memory_for_it(world):
    torch.empty(1 << 42, device=world.device)


def test_leaves_settings(world):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.ones(1 << 20, device=world.device)


def test_has_those_of_before(world):
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


@pytest.mark.parametrize("number", range(2))
def test_is_seeded(world, number):
    print("drawn", torch.rand(2, device=world.device).tolist())


def test_compiles(world):
    assert torch.compile(lambda x: (x * 2 + 1).sum())(torch.arange(8.0, device=world.device)).item() == 64
