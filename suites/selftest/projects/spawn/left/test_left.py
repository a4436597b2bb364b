"""Tests that leave processes which they have started."""

import concurrent.futures
import multiprocessing
import os
import subprocess
import time

import pytest
import torch.multiprocessing as mp

CONTEXT = multiprocessing.get_context("spawn")


def wait():
    time.sleep(1000)


def fail():
    raise ValueError("of the process")


def leave():
    subprocess.Popen(["sleep", "1000"])


def nest():
    multiprocessing.get_context("spawn").Process(target=wait).start()
    os._exit(0)


def start(rank):
    multiprocessing.get_context("spawn").Process(target=wait).start()


def run(target):
    process = CONTEXT.Process(target=target)
    process.start()
    process.join()
    return process


def test_running():
    CONTEXT.Process(target=wait).start()


def test_context():
    mp.spawn(time.sleep, nprocs=2, join=False)
    mp.spawn(wait_of_rank, nprocs=1, join=False)


def wait_of_rank(rank):
    wait()


def test_unseen():
    run(fail)


def test_seen():
    assert run(fail).exitcode == 1


def test_child():
    run(leave)


def test_nested():
    run(nest)


def test_on_rank():
    mp.spawn(start)


def test_after_rank():
    mp.spawn(print)


POOLS = {}


def pool_of(name):
    """Return a pool that lives as long as this module: the first test that wants it makes it."""
    if name not in POOLS:
        if name == "pool":
            POOLS[name] = CONTEXT.Pool(2)
        else:
            POOLS[name] = concurrent.futures.ProcessPoolExecutor(2, mp_context=CONTEXT)
    return POOLS[name]


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("name", ["pool", "executor"])
def test_shared(name, time):
    pids = set(pool_of(name).map(pid_of, range(4)))
    assert POOLS.setdefault(f"pids of {name}", pids) & pids


def pid_of(number):
    time.sleep(0.05)  # so that the other process takes some
    return os.getpid()


@pytest.fixture(scope="module")
def server():
    process = CONTEXT.Process(target=wait)
    process.start()
    yield process
    process.terminate()
    process.join()


@pytest.mark.parametrize("time", [1, 2])
def test_fixture(server, time):
    assert server.is_alive()


def test_healthy():
    assert run(print).exitcode == 0
