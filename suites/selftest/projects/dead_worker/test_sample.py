"""Tests on the ranks of both workers of pytest-xdist."""

import os
import time

import pytest
from notes import note


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", range(4))
def test_on_ranks(world, turn):
    note(world, os.environ["PYTEST_XDIST_WORKER"])
    time.sleep(0.1)
    world.barrier()
