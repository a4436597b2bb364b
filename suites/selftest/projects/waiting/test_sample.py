"""Ranks that wait for each other, under fixtures of all scopes."""

import os

import pytest
from notes import note

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="session")
def wide(world):
    yield
    note(world, "wide-torn-down")


@pytest.fixture
def narrow(world):
    yield
    note(world, "narrow-torn-down")


@pytest.mark.ranks(1)
def test_other_world(world, wide):
    pass


def test_waits(world, wide, narrow):
    note(world, "reached")
    if world.rank == 1:
        dist.recv(torch.ones(5), src=0)
    dist.all_reduce(torch.ones(3))
