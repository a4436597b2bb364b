"""A mismatch that gloo does not notice."""

import os

import pytest

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def sum_up(world):
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if world.rank else torch.float32))


def test_alike(world):
    assert world.gather(world.rank) == [0, 1]


def test_unlike(world):
    sum_up(world)


@pytest.mark.xfail(strict=True)
def test_expected(world):
    sum_up(world)
    assert world.size == 3
