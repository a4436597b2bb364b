"""The faults under `mp.spawn`."""

import tempfile

import faults
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, name, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    getattr(faults, name)(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["killed", "exits", "hangs", "deadlocks", "skips", "leaks"])
def test(name):
    mp.spawn(run, args=(name, tempfile.mkstemp()[1]), nprocs=2, join=True)
