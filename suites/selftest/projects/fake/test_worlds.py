import os
import unittest

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(8, 1024, backend="fake")


def received():
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor


@pytest.fixture(scope="module")
def size_of_set_up(world):
    return world.rank, world.size


def test_default(world, size_of_set_up):
    assert size_of_set_up == (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())
    assert os.environ["RANK"] == str(world.rank)
    assert os.environ["WORLD_SIZE"] == str(world.size)
    print("seen by", world.rank, "of", world.size)


@pytest.mark.ranks(1024, backend="fake", as_rank=[0, 511, 1023])
@pytest.mark.parametrize("number", [1, 2])
def test_named(world, number):
    assert world.rank in (0, 511, 1023)


@pytest.mark.ranks(1024, backend="fake", as_rank=511)
def test_reads(world):
    assert received().sum() == 2


@pytest.mark.ranks(1024, backend="fake", as_rank=[0, 511])
def test_fails_on_one(world):
    assert world.rank != 511


@pytest.mark.ranks(1024, backend="fake", as_rank=511)
def test_dies(world):
    os._exit(3)


@pytest.mark.ranks(4, backend="fake", as_rank=3)
def test_cases(world, run_subtests):
    def claim(number):
        assert number != 2

    run_subtests({"number": [1, 2, 3]}, claim)
    assert (dist.get_rank(), dist.get_world_size()) == (3, 4)


@pytest.mark.ranks(4, backend="fake", as_rank=2)
def test_warns(world):
    world.mesh(2, 2)
    dist.new_group([0, 2])


@pytest.mark.ranks(4, backend="fake", as_rank=2)
class TestOfUnittest(unittest.TestCase):
    def test_rank(self):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 4)


@pytest.mark.ranks(4, backend="fake")
class TestOfSeveral(unittest.TestCase):
    def test_rank(self):
        raise NotImplementedError


@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.ranks(4, backend="fake"))])
def test_marked_late(world, size):
    raise NotImplementedError
