"""A rank that dies after its test."""

import os
import threading
import time

import pytest

pytestmark = pytest.mark.ranks(2)


def test_leaves_a_bomb(world):
    if world.rank == 1:
        threading.Timer(0.6, os._exit, (9,)).start()


@pytest.mark.ranks(1)
def test_lasts_a_second(world):
    time.sleep(1)


def test_innocent(world):
    world.barrier()
