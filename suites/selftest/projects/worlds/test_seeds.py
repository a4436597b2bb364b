"""Random numbers, which start at one seed in each test."""

import os
import pathlib
import random

import numpy
import pytest

if "RANK" in os.environ:
    import torch
pytestmark = pytest.mark.ranks(2)


def draw(world):
    numbers = (random.random(), numpy.random.rand(), torch.rand(1).item(), world.seed)
    assert len(set(world.gather(numbers))) == 1
    pathlib.Path(f"numbers-{world.rank}.txt").open("a").write(f"{numbers}\n")


def test_a(world):
    draw(world)


def test_b(world):
    draw(world)
