"""Tests that begin, print and die while the one before is being reported, in the order of this file."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from notes import note

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def wide(world):
    note(world, "wide-set-up")
    yield
    note(world, "wide-torn-down")


def test_first(world, wide):
    print(f"first on rank {world.rank}")
    note(world, "process")


def test_second(world, wide):
    print(f"second on rank {world.rank}")
    note(world, "process")
    note(world, "printed")
    assert world.rank == 0, "as it should"


def test_before_death(world, wide):
    dist.barrier()


def test_dies(world):
    dist.barrier()
    if world.rank == 1:
        note(world, "about-to-die")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_before_hang():
    pass


@pytest.mark.ranks(2, timeout=1.0)
def test_hangs(world):
    if world.rank == 1:
        time.sleep(60)
    dist.barrier()


def test_before_other():
    pass


@pytest.mark.ranks(3)
def test_on_three(world):
    assert not Path("never-1.txt").exists()
    assert world.gather(world.rank) == [0, 1, 2]


def test_before_passed_over(world):
    dist.barrier()


def test_passed_over(world):
    note(world, "passed-over")
    dist.barrier()


def test_last(world):
    note(world, "last")
    assert world.gather(world.rank) == [0, 1]
