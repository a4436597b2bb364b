"""Tests that pass, fail, exit and are interrupted on ranks."""

import random

import pytest

pytestmark = pytest.mark.ranks(2)


def test_calm(world):
    print("calm")


def test_seeds(world):
    import numpy
    import torch

    here = [random.random(), float(numpy.random.rand()), torch.rand(2)]
    world.assert_same(here)
    assert world.seed == 7
    assert here[0] == random.Random(world.seed).random()
    assert here[2].tolist() == torch.rand(2, generator=torch.Generator().manual_seed(world.seed)).tolist()


def test_fails(world):
    print("said by", world.rank)
    assert world.rank == 0


def test_exits(world):
    if world.rank == 1:
        pytest.exit("enough")
    world.barrier()


def test_is_interrupted(world):
    if world.rank == 0:
        raise KeyboardInterrupt


def test_after(world):
    pass
