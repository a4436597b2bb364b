import os
import signal

import library
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis.strategies import integers


def test_plain():
    library.in_the_controller()


@pytest.mark.ranks(2)
def test_ranks(world):
    library.on_rank(world.rank)
    import only_on_ranks  # noqa: F401


@pytest.mark.filterwarnings("ignore:It looks like `register_random`")  # of Hypothesis itself, on Python 3.14
@pytest.mark.ranks(2)
def test_property(world):
    @given(integers())
    def holds(number):
        assert world.rank == 0 or number < 100  # before a collective: the group is repaired
        dist.all_reduce(torch.ones(1))

    library.after_a_property(holds)


@pytest.mark.ranks(2)
def test_before(world):
    library.before_the_end(world.rank)


@pytest.mark.ranks(2)
def test_killed(world):
    if world.rank == 0:
        print("dying")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks(2)
def test_cases(world, run_subtests):
    def claim(n):
        assert n == 1

    run_subtests({"n": [1, 2]}, claim)
