"""Ranks that hang: in Python, in a lock, a store or a collective, with the GIL, or stopped."""

import ctypes
import os
import pathlib
import signal
import subprocess
import threading
import time

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=1)


def hold_the_gil():
    10**10**8  # for ever


def sleep_with_the_gil():
    ctypes.PyDLL(None).sleep(100)  # which a signal would end


@pytest.mark.ranks(9, timeout=2)
def test_nine_ways(world, tmp_path):
    def of_a_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # again

    def of_a_file_store():
        dist.FileStore(str(tmp_path / "store"), 1).get("never")

    def of_a_tcp_store():
        dist.TCPStore("127.0.0.1", 0, 1, True).get("never")

    def of_recv():
        dist.recv(torch.ones(1), 0)

    def of_a_child():
        subprocess.run(["sleep", "100"])

    def of_python():
        sum(0 for _ in iter(int, 1))  # in Python

    def deaf():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        sleep_with_the_gil()

    def stopped():
        os.kill(os.getpid(), signal.SIGSTOP)

    ways = (of_a_lock, of_a_file_store, of_a_tcp_store, of_recv, of_a_child, of_python, hold_the_gil)
    (*ways, deaf, stopped)[world.rank]()


def test_sleep_of_all(world):
    time.sleep(100)  # all


def test_sleep_with_the_gil(world):
    if world.rank == 1:
        sleep_with_the_gil()


@pytest.mark.ranks(2, timeout=30)
def test_stopped(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_loop_while_the_other_waits(world):
    if world.rank == 1:
        while True:
            pass
    dist.barrier()


def test_stop_while_the_other_waits(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_gil_while_the_other_waits(world):
    if world.rank == 1:
        sleep_with_the_gil()
    dist.barrier()


@pytest.fixture
def hangs_in_set_up(world):
    if world.rank == 1:
        time.sleep(100)  # early


def test_set_up(hangs_in_set_up):
    pass


@pytest.fixture
def hangs_in_tear_down(world):
    yield
    if world.rank == 1:
        time.sleep(100)  # late


def test_tear_down(hangs_in_tear_down):
    pass


def test_sleep_in_a_case(world, run_subtests):
    def claim(n):
        if world.rank == 1:
            time.sleep(100)  # in a case

    run_subtests({"n": [1]}, claim)


@pytest.fixture
def clears_up_slowly(world):
    yield
    if world.rank == 0:
        time.sleep(1.2)
        pathlib.Path("cleared.txt").touch()


@pytest.mark.ranks(2, timeout=30)
def test_failure_while_the_other_clears_up(world, clears_up_slowly):
    assert world.rank == 0, "the only news"


def test_failure_while_the_other_computes(world):
    assert world.rank == 0
    while True:
        pass  # no collective


def test_failure_while_the_other_holds_the_gil(world):
    assert world.rank == 0
    hold_the_gil()


def test_failure_in_a_thread_that_lives_on(world):
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
    assert world.rank == 0


def test_thread_that_lives_on(world):
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
