"""A test that lasts until the file `go` exists."""

import os
import pathlib
import time

import pytest
from notes import note


@pytest.mark.ranks(2)
def test_meets(world):
    world.barrier()
    note(world, "met")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    run = os.environ["RUN"]
    assert world.gather((world.rank, os.environ["RUN"])) == [(0, run), (1, run)]
