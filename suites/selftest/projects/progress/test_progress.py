"""Tests that take as long as the reader of the screen wants."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def save(name):
    while not Path(name).exists():
        time.sleep(0.02)


def test_fails(world):
    assert world.size == 3


def test_waits(world):
    if world.rank == 1:
        save("seen-waits")
    dist.all_reduce(torch.ones(2))


def test_cases(world, run_subtests):
    def claim(number):
        if number == 2:
            save("seen-cases")

    run_subtests({"number": [0, 1, 2, 3]}, claim)


def test_is_short(world):
    pass
