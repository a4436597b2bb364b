"""A host is lost while ranks run on it, between two tests, and while a world starts."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def reach(place):
    """Say that the test has come here, and wait until the test of the harness has lost or mended a host."""
    (HERE / f"{place}.reached").touch()
    while not (HERE / place).exists():
        time.sleep(0.02)


def add_ones(world):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size, world.size]


@pytest.mark.ranks(4, hosts=2)
def test_lost_in_a_collective(world):
    dist.barrier()
    if world.rank == 0:
        reach("lost in a collective")
    dist.barrier()


@pytest.mark.ranks(2)
def test_on_one_host(world):
    add_ones(world)


@pytest.mark.ranks(2, hosts=2)
def test_needs_the_lost_host(world):
    add_ones(world)


def test_until_it_is_back():
    reach("back")


@pytest.mark.ranks(2, hosts=2)
def test_on_the_host_that_is_back(world):
    add_ones(world)


def test_loses_it_again():
    reach("lost between tests")


@pytest.mark.ranks(2, hosts=2)
def test_on_a_warm_world_of_the_lost_host(world):
    add_ones(world)


def test_until_it_is_back_again():
    reach("back again")


@pytest.mark.ranks(2, hosts=2)
def test_on_the_host_that_is_back_again(world):
    add_ones(world)


@pytest.mark.ranks(3, hosts=2)
def test_lost_while_its_world_starts(world):
    """Its ranks wait in conftest.py."""


@pytest.mark.ranks(2)
def test_on_one_host_at_the_end(world):
    add_ones(world)
