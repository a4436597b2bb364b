"""Ranks that leave a collective, and a failed test, one after the other."""

import os
import time

import pytest
from notes import note

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(3)
def test_one_way(world):
    if world.rank == 2:
        time.sleep(2)
    dist.gather(torch.ones(1), [torch.zeros(1) for _ in range(3)] if world.rank == 1 else None, dst=1)


@pytest.fixture
def slow_to_tear_down(world):
    yield
    time.sleep(1)
    note(world, "torn-down")


def test_fails(world, slow_to_tear_down):
    assert False
