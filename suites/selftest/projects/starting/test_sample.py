"""Tests that note their processes, random numbers and modules."""

import os
import pathlib
import random
import sys

import numpy
import pytest
from notes import note

if "RANK" in os.environ:
    import torch
pytestmark = pytest.mark.ranks(2)


pytestmark = pytest.mark.ranks(2, timeout=60)


def draw(world):
    numbers = (random.random(), numpy.random.rand(), torch.rand(1).item(), world.seed)
    assert len(set(world.gather(numbers))) == 1
    pathlib.Path(f"numbers-{world.rank}.txt").open("a").write(f"{numbers}\n")


def test_a_first(world):
    note(world, "pids")
    draw(world)


def test_a_second(world):
    note(world, "pids")
    draw(world)


def test_a_module(world):
    import heavy

    assert heavy.pid == os.getppid()
    assert "torch.distributed.fsdp" not in sys.modules  # which is preloaded where nothing else is asked for


def test_a_failure(world, run_subtests):
    assert False


def test_not_chosen(world):
    note(world, "pids")
