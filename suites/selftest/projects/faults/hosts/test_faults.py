"""Faults of rank 1, which is on host b, one after the other; a healthy test after each."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from healthy import test_healthy  # noqa: F401

pytestmark = pytest.mark.ranks(2, hosts=2, timeout=20)


def test_where_ranks_are(world):
    places = world.gather((world.host, world.local_rank, world.local_size))
    assert places == [("a", 0, 1), ("b", 0, 1)]
    assert world.hosts == ("a", "b")
    print(f"rank {world.rank} is at home")


def test_assertion_while_the_other_waits(world):
    assert world.rank == 0, "a failure on host b"
    dist.barrier()


def test_killed_before_a_collective(world):
    print(f"output of rank {world.rank}")
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_crash(world):
    if world.rank:
        os.abort()


def test_exit(world):
    if world.rank:
        os._exit(3)


def test_mismatch(world):
    if world.rank:
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))


def test_left_out(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))


@pytest.mark.ranks(2, hosts=2, timeout=1)
def test_sleeps(world):
    if world.rank:
        time.sleep(1000)
    dist.barrier()


def test_stopped(world):
    if world.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_skip_on_one_rank(world):
    if world.rank:
        pytest.skip("not today")


def test_one_bad_subtest(world, run_subtests):
    def claim(n):
        assert (world.rank, n) != (1, 2)
        dist.all_reduce(torch.ones(n))

    run_subtests({"n": [1, 2, 3]}, claim)


def test_left_process(world):
    if world.rank:
        import subprocess

        subprocess.Popen(["sleep", "1000"], start_new_session=True)


@pytest.mark.ranks(3, hosts=3)
def test_on_more_hosts_than_there_are(world):
    """Never runs."""


def test_shared_directory(world):
    world.shared_tmp_path  # noqa: B018
