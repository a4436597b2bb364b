"""A failed rank that leaves a process in another session."""

import time

import pytest

pytestmark = pytest.mark.ranks(2)


def test_gathers(world):
    assert world.gather(world.rank) == [0, 1]


def test_fails(world):
    if world.rank == 1:
        import subprocess

        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    world.barrier()
    assert world.rank == 1
    time.sleep(100)
