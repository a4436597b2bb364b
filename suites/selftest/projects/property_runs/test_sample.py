"""Properties that note their examples."""

import os
import pathlib
import signal

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.ranks(2)


few = settings(max_examples=30, phases=[phase for phase in Phase if phase is not Phase.explain])


def see(world, number, name):
    with pathlib.Path(f"{name}-{world.rank}.txt").open("a") as file:
        file.write(f"{number}\n")


@few
@given(st.integers())
def test_kept(world, number):
    see(world, number, "kept")
    assert world.rank == 0 or number < 100


@settings(few, database=None)
@given(st.integers())
def test_not_kept(world, number):
    see(world, number, "not_kept")
    assert world.rank == 0 or number < 100


@few
@given(st.integers())
def test_passes(world, number):
    see(world, number, "passes")
    event("seen")


@few
@given(st.integers(0, 6))
def test_kills(world, number):
    see(world, number, "kills")
    if world.rank == 1 and number > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
