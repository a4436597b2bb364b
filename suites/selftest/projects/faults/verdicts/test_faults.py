"""Ranks that fail, skip, die or hang, each in its usual way."""

import os
import time

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_assertion_on_one_rank(world):
    print("said by", world.rank)
    left = world.rank
    assert left == 0


def test_assertion_while_the_other_waits(world):
    assert world.rank == 0
    dist.all_reduce(torch.ones(3))


def test_assertion_on_all_ranks(world):
    assert world.size == 5


def test_different_failures(world):
    if world.rank == 0:
        time.sleep(0.1)
        raise KeyError("later")
    raise ValueError("sooner")


def test_skip_on_one_rank(world):
    if world.rank == 1:
        pytest.skip("not today")
    dist.all_reduce(torch.ones(3))


def test_skip_on_all_ranks(world):
    pytest.skip("not today")


@pytest.mark.ranks(2, timeout=1.5)
def test_hang(world):
    if world.rank == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(3, 5, dtype=torch.float16))


def test_collective_that_one_rank_misses(world):
    if world.rank == 1:
        dist.all_reduce(torch.ones(3))


def test_collective_left_in_flight(world):
    if world.rank == 1:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.fixture
def meets_in_teardown(world):
    yield
    dist.barrier()


def test_failure_before_a_collective_teardown(world, meets_in_teardown):
    assert world.rank == 0, "the only news"


@pytest.fixture
def breaks_on_rank_0(world):
    yield
    assert world.rank == 1, "a failure in tear-down"


def test_failures_of_two_phases(world, breaks_on_rank_0):
    assert world.rank == 0, "a failure in call"


@pytest.mark.xfail
def test_unexpected_pass(world):
    pass


@pytest.mark.xfail(strict=True)
def test_strict_unexpected_pass(world):
    pass


def test_subtests(world, subtests):
    for i in range(3):
        with subtests.test(i=i):
            assert (world.rank, i) != (1, 2)


@pytest.mark.ranks(3)
def test_third_rank_only(world):
    assert world.rank != 2
