"""Output in amounts, on streams and in bytes that are unusual."""

import os
import sys

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

MEGABYTE = ("y" * 99 + "\n") * 10_000


def test_much_fails(world):
    for _ in range(100 * world.rank):
        os.write(1, MEGABYTE.encode())
    assert world.rank == 0, "after much"


def test_much_dies(world):
    for _ in range(100 * world.rank):
        os.write(2, MEGABYTE.encode())
    if world.rank == 1:
        os._exit(5)


def test_stdout_closed(world):
    if world.rank == 1:
        sys.stdout.close()


def test_stdout_closed_and_failed(world):
    if world.rank == 1:
        sys.stdout.close()
        raise ValueError("after closing")


def test_stderr_closed_and_aborted(world):
    if world.rank == 1:
        sys.stderr.close()
        os.abort()


def test_descriptors_closed(world):
    if world.rank == 1:
        for stream in (0, 1, 2):
            os.close(stream)


def test_descriptors_closed_and_failed(world):
    if world.rank == 1:
        os.close(1)
        os.close(2)
        raise ValueError("after closing")


def test_descriptors_closed_and_aborted(world):
    if world.rank == 1:
        os.close(1)
        os.close(2)
        os.abort()


def test_descriptors_redirected(world, tmp_path):
    if world.rank == 1:
        file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        print("elsewhere", flush=True)
        raise ValueError("after redirecting")


def test_streams_replaced(world, tmp_path):
    if world.rank == 1:
        sys.stdout = sys.stderr = open(tmp_path / "file", "w")
        raise ValueError("after replacing")


def test_streams_gone(world):
    if world.rank == 1:
        sys.stdout = sys.stderr = None
        raise ValueError("without streams")


def test_full_device(world):
    if world.rank == 1:
        file = os.open("/dev/full", os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        print("into nothing")
        raise ValueError("after filling")


def test_bytes(world):
    if world.rank == 1:
        os.write(1, b"zero \x00 escape \x1b[31m no text \xff\xfe\n")
        print("lone \udcff")
        raise ValueError("after bytes")


def test_input(world):
    if world.rank == 1:
        input()
    dist.barrier()
