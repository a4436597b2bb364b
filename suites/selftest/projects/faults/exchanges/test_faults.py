"""Sends and receives that another rank does not take up, and some that it does."""

import os

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_send_without_a_receive(world):
    dist.isend(torch.ones(3), 1 - world.rank)


def test_receive_without_a_send(world):
    if world.rank == 1:
        dist.irecv(torch.ones(2, 2), 0, tag=7)


def test_sends_that_outnumber_receives(world):
    if world.rank == 0:
        handles = [dist.isend(torch.ones(1), 1) for _ in range(3)]
        handles[0].wait()
        handles[1].wait()
    else:
        received = torch.zeros(1)
        dist.recv(received)
        dist.recv(received)


def test_messages_without_a_wait(world):
    """The messages have arrived, or not, when their handles are dropped."""
    peer = 1 - world.rank
    dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.ones(1), peer)]
    )


def test_unequal_sends(world):
    """Sends count on the ranks that take part: no reason to call ranks out of step."""
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
