"""Sockets that listen, of a world's groups."""

import os
import pathlib

import pytest

if "RANK" in os.environ:
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


def test_a(world):
    dist.barrier()
    listening = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
    files = pathlib.Path("/proc/self/fd").iterdir()
    mine = {os.readlink(file) for file in files if os.path.lexists(file)}
    mine = {line[1].split(":")[0] for line in listening if f"socket:[{line[9]}]" in mine}
    assert mine == {"0100007F"}
