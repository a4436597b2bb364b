"""Processes of ranks that end, stop or run out of memory."""

import ctypes
import os
import resource
import signal
import threading
import time

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def dies_in_setup(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_set_up(world, dies_in_setup):
    dist.barrier()


@pytest.fixture
def dies_in_teardown(world):
    yield
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_tear_down(world, dies_in_teardown):
    pass


def test_exit_0(world):
    if world.rank == 1:
        os._exit(0)
    dist.barrier()


def test_exit_255(world):  # as if the server had not seen it end
    if world.rank == 1:
        os._exit(255)


def test_all_ranks_exit(world):
    os._exit(6)


def test_the_first_rank_is_killed(world):
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # of rank 1


def test_terminated(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)


def test_signal_without_a_name(world):
    if world.rank == 1:
        os.kill(os.getpid(), 40)
        time.sleep(100)


def test_interrupted(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)


def test_bad_pointer(world):
    threading.Thread(target=lambda: time.sleep(100), daemon=True).start()
    if world.rank == 1:
        ctypes.string_at(0)


def test_abort(world):
    if world.rank == 1:
        os.abort()


def test_other_dtypes(world):
    dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][world.rank]))


def test_other_shapes(world):
    dist.all_reduce(torch.ones([3, 100_000][world.rank]))


def test_native_stack_overflow(world):
    if world.rank == 1:
        nested = b"(" * 10**6 + b")" * 10**6
        ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(256), nested, 1)  # glibc recurses


def test_recursion(world):
    def again(n):
        return again(n + 1)  # and again

    if world.rank == 1:
        again(0)


def leave_memory(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.RLIM_INFINITY))


def test_python_is_out_of_memory(world):
    if world.rank == 1:
        leave_memory(100)
        bytearray(1 << 30)


def test_torch_is_out_of_memory(world):
    if world.rank == 1:
        leave_memory(100)
        torch.empty(1 << 30, dtype=torch.uint8)


def test_bad_alloc(world):
    if world.rank == 1:
        value = "x" * (100 << 20)
        leave_memory(150)
        dist.HashStore().set("key", value)  # two copies more


def test_every_file_descriptor_is_closed(world):
    if world.rank == 1:
        os.closerange(3, 1000)
        raise ValueError("never heard of")


def test_a_thread_ends_the_rank_while_the_other_waits(world):
    if world.rank == 1:
        threading.Thread(target=os._exit, args=(9,)).start()
    dist.barrier()
    time.sleep(100)
