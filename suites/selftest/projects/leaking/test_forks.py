"""Tests that fork."""

import os
import signal
import sys
import time

import pytest
from pids import note

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_copy_that_returns(world, tmp_path):
    pid = os.fork()
    if pid == 0:
        return
    assert wait_for(pid) == 0
    assert tmp_path.exists()
    world.barrier()


def test_copy_that_raises(only):
    pid = os.fork()
    if pid == 0:
        raise ValueError(f"in the copy of {only}")
    assert wait_for(pid) == 1


def test_copy_that_exits(world):
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert wait_for(pid) == 7


@pytest.fixture
def forks():
    pid = os.fork()
    yield pid
    assert pid, "the copy came to the tear-down"


def test_copy_of_a_fixture(world, forks):
    assert wait_for(forks) == 0


def test_copy_in_a_subtest(world, subtests):
    with subtests.test("copied"):
        pid = os.fork()
        assert pid, "reported by the copy"
    assert wait_for(pid) == 1


def test_copy_in_a_case(world, run_subtests):
    def claim(n):
        pid = os.fork()
        assert pid, "voted by the copy"
        assert wait_for(pid) == 1

    run_subtests({"n": [1, 2]}, claim)


def test_copy_with_a_group_of_its_own(world):
    pid = os.fork()
    if pid == 0:
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        os._exit(5)
    assert wait_for(pid) == 5
    assert world.gather(world.rank) == [0, 1]


def test_copy_that_stays(only):
    if only:
        pid = os.fork()
        if pid == 0:
            time.sleep(300)
        note(pid)


def test_rank_that_dies_before_its_copy(world):
    if world.rank == 1:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(300)
        note(pid)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_healthy_after_forks(world):
    assert world.gather(world.rank) == [0, 1]
