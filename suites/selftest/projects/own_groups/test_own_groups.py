"""Tests that make their own process groups, in worlds that start without one."""

import datetime
import os
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, group=False, timeout=20)


def test_environment(world):
    assert not dist.is_initialized()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    rank = str(world.rank)
    assert [os.environ[name] for name in names] == [rank, rank, "2", "2", "127.0.0.1"]
    if world.rank == 0:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            free.listen()


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("method", [None, "env://", "tcp"])
def test_left_group(world, method, attempt):
    assert not dist.is_initialized()
    where = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}" if method == "tcp" else method
    dist.init_process_group("gloo", init_method=where, rank=world.rank, world_size=world.size)
    assert dist.get_world_size() == 2
    assert world.gather(world.rank) == [0, 1]
    assert dist.get_world_size(dist.new_group([0])) in (1, -1)


def test_destroyed_group(world):
    dist.init_process_group("gloo")
    world.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="class")
def group():
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    dist.destroy_process_group()


class TestWideFixture:
    def test_first(self, world, group):
        assert world.gather(world.rank) == [0, 1]

    def test_second(self, world, group):
        assert world.group is group
        assert world.gather(world.rank) == [0, 1]


def test_after_the_fixture():
    assert not dist.is_initialized()


def test_without_group(world):
    with pytest.raises(RuntimeError, match=r"\(group=False\): call torch.distributed.init_process_group\(\)"):
        world.gather(1)
    with pytest.raises(RuntimeError, match="group=False"):
        world.barrier()


def test_hang(world):
    dist.init_process_group("gloo")
    if world.rank == 0:
        dist.barrier()


@pytest.mark.parametrize("method", [None, "file", "tcp"])
def test_missing(world, method, tmp_path_factory):
    rest = {"rank": world.rank, "world_size": world.size}
    if method == "file":
        rest["init_method"] = f"file://{tmp_path_factory.mktemp('meeting')}/store"
    elif method == "tcp":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rest["init_method"] = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    if world.rank == 0:
        dist.init_process_group("gloo", **rest)


def test_caught(world):
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        event = threading.Event()
        threading.Timer(1, event.set).start()
        event.wait()


def test_mismatch(world):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2 + world.rank))


def test_death(world):
    dist.init_process_group("gloo")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_failure(world):
    dist.init_process_group("gloo")
    assert world.rank == 0
    dist.barrier()


def test_ended_early(world):
    if world.rank == 1:  # what gloo says now and then, where a group is destroyed as soon as it is made
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc] Connection closed by peer [::1]:42")


def test_end(world):
    dist.init_process_group("gloo")
    world.barrier()
