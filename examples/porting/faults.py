"""Six faults of rank 1 of two, which the tests of each launcher run."""

import os
import signal
import subprocess

import pytest
import torch
import torch.distributed as dist


def killed(rank):
    """Die by a signal, as where memory runs out."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def exits(rank):
    """End early, with the status of success."""
    if rank == 1:
        os._exit(0)


def hangs(rank):
    """Leave rank 0 alone in a collective."""
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def deadlocks(rank):
    """Use two groups in a different order on each rank."""
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def skips(rank):
    """Skip what rank 0 runs."""
    if rank == 1:
        pytest.skip("not on this rank")


def leaks(rank):
    """Leave a child process."""
    if rank == 1:
        subprocess.Popen(["sleep", "100"])
