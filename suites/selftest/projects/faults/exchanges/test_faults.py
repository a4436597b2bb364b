"""Sends and receives that another rank does not take up, and some that it does."""

import inspect
import os
import signal
import threading
import time
from datetime import timedelta

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


def test_ranks_that_all_receive_first(world):
    received = torch.zeros(3)
    dist.recv(received, 1 - world.rank)
    dist.send(received, 1 - world.rank)


def test_one_receive_too_many(world):
    """Rank 1 has ended the test, and has sent one message of two."""
    if world.rank == 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2), 1) for _ in range(2)]):
            work.wait()
    else:
        dist.isend(torch.ones(2), 0).wait()


def test_a_receive_that_times_out(world):
    """The group has a timeout of its own: the receive ends by itself, as the test expects."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            dist.recv(torch.ones(1), 1, group=group)


def test_a_wait_that_times_out(world):
    """In the group of the world, which is of no use to the next test then."""
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            dist.irecv(torch.ones(1), 1).wait(timeout=timedelta(seconds=1))


def test_a_late_message(world):
    if world.rank == 0:
        dist.recv(received := torch.zeros(1))
        assert received.item() == 1
    else:
        time.sleep(2.7)  # longer than ranks have waited that are ended
        dist.send(torch.ones(1), 0)


def test_a_message_of_a_timer(world):
    """No frame of the user's is on the stack of the thread that will send."""
    if world.rank == 0:
        threading.Timer(2.7, dist.send, (torch.ones(1), 1)).start()
        dist.recv(torch.ones(1), 1, tag=1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0, tag=1)


@pytest.mark.ranks(2, backend="shm")  # the wait of gloo runs no handler of signals
def test_an_alarm_of_the_test(world):
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2.7)
    with pytest.raises(TimeoutError):
        dist.recv(torch.ones(1), 1 - world.rank)
    signal.signal(signal.SIGALRM, before)


def test_a_group_in_another_order(world):
    has_orders = "sort_ranks" in inspect.signature(dist.new_group).parameters  # not in torch 2.11
    group = dist.new_group([1, 0], **({"sort_ranks": False} if has_orders else {}))
    dist.recv(torch.ones(4), 1 - world.rank, group=group, tag=2)


def test_a_receive_that_no_wrapper_sees(world):
    """Compiled code calls the operator: a send that was waited for was received."""
    tensor = torch.full((3,), world.rank + 1.0)
    if world.rank == 0:
        dist.isend(tensor, 1).wait()
    elif dist.get_backend() == "shm":  # which has no operators
        dist.recv(tensor, 0)
    else:
        work = torch.ops.c10d.recv_([tensor], dist.group.WORLD.boxed(), 0, 0)
        dist.Work.unbox(work).wait()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
