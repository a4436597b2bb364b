"""Values and output that are no UTF-8, or huge."""

import os
import sys

import pytest

pytestmark = pytest.mark.ranks(2)


def test_environment(world):
    assert os.environb[b"ODD"] == b"\xff\xfe"
    assert os.environ["HUGE"] == "x" * 100_000
    assert os.environ["SET_BY_CONFTEST"] == "in the controller"
    assert "REMOVED_BY_CONFTEST" not in os.environ


def test_output(world):
    os.write(1, b"bytes \xff\n")
    sys.stdout.buffer.write(b"more \xff\n")
    assert world.rank == 0, "odd \udcff text"


@pytest.mark.parametrize("x", ["\udcff", "é", "a" * 5000], ids=str)
def test_ids(world, x):
    world.barrier()


def test_last_words(world):
    os.write(2, b"raw \xff\n")
    if world.rank == 1:
        os._exit(3)
