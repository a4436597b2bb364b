"""Ranks that fail, skip, die or hang, each in its usual way."""

import ctypes
import os
import signal
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


def test_exit_code(world):
    if world.rank == 1:
        os._exit(3)


def test_exit_without_error(world):
    if world.rank == 1:
        os._exit(0)


def test_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_before_a_collective(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def test_segmentation_fault(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_system_exit(world):
    if world.rank == 1:
        raise SystemExit(7)


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


@pytest.mark.ranks(2, timeout=1.5)
def test_mismatch(world):
    if world.rank == 1:
        dist.barrier()
    else:
        dist.all_gather([torch.ones(3)] * 2, torch.ones(3))


@pytest.mark.ranks(2, timeout=1.5)
def test_hang_that_holds_the_gil(world):
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(100)


def test_collective_that_one_rank_misses(world):
    if world.rank == 1:
        dist.all_reduce(torch.ones(3))


def test_collective_left_in_flight(world):
    if world.rank == 1:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.fixture
def breaks_on_rank_1(world):
    if world.rank == 1:
        raise ValueError("in set-up")
    dist.barrier()


def test_setup_error(breaks_on_rank_1):
    pass


@pytest.fixture
def breaks_late_on_rank_1(world):
    yield
    assert world.rank == 0, "in tear-down"


def test_teardown_error(breaks_late_on_rank_1):
    pass


@pytest.fixture
def meets_in_teardown(world):
    yield
    dist.barrier()


def test_failure_before_a_collective_teardown(world, meets_in_teardown):
    assert world.rank == 0, "the only news"


@pytest.mark.xfail(raises=AssertionError, strict=True)
def test_expected_failure_of_one_rank(world):
    assert world.rank == 0
    dist.barrier()


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


def test_unequal_sends(world):
    """Sends count on the ranks that take part: no reason to call ranks out of step."""
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
