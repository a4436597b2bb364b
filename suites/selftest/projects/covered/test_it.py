import os
import signal
import time

import library
import pytest


def test_plain():
    library.in_the_controller()


@pytest.mark.ranks(2)
def test_ranks(world):
    library.on_rank(world.rank)
    import only_on_ranks  # noqa: F401


@pytest.mark.ranks(1)
def test_long(world):
    library.before_the_end()
    time.sleep(1.1)


@pytest.mark.ranks(1)
def test_killed(world):
    print("dying")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks(2)
def test_cases(world, run_subtests):
    def claim(n):
        assert n == 1

    run_subtests({"n": [1, 2]}, claim)
