"""Groups of shm in a world of gloo. The file does not spell the name: the server would import the backend."""

import sys

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, backend="gloo")
BACKEND = str.lower("SHM")


def test_imports_in_its_body(collectives):
    assert "lockstep.shm" not in sys.modules
    dist.all_reduce(torch.ones(3))
    assert len(collectives) == 1
    import lockstep.shm

    assert lockstep.shm.record() == []
    assert len(collectives) == 1
    group = dist.new_group(backend=BACKEND)
    dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(RuntimeError, match="which was imported after the log was entered"):
        collectives.counts()


def test_log(collectives):
    group = dist.new_group(backend=BACKEND)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(4), group=group)
    assert [entry.shape for entry in collectives.of("all_reduce")] == [(3,), (4,)]


def test_unmatched(world):
    group = dist.new_group(backend=BACKEND)
    if world.rank == 0:
        dist.isend(torch.ones(2), 1, group=group)
