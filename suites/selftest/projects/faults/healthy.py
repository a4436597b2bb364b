"""A healthy test after every fault of a file, on the same ranks: a plugin, and what the file imports."""

import os

import pytest

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist


def test_healthy(world, after):
    """Nothing that a fault has left behind reaches the test after it."""
    assert world.gather(world.rank) == [0, 1]
    received = torch.empty(2)
    sent = dist.isend(torch.full((2,), float(world.rank)), 1 - world.rank)
    dist.recv(received, 1 - world.rank)
    sent.wait()
    assert received.tolist() == [1 - world.rank] * 2


def pytest_generate_tests(metafunc):
    if "after" in metafunc.fixturenames:
        names = [name for name in vars(metafunc.module) if name.startswith("test_")]
        metafunc.parametrize("after", [name for name in names if name != "test_healthy"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put each healthy test after its fault; on ranks too, though it need not be."""
    places = {item.name: place for place, item in enumerate(items)}
    items.sort(key=lambda item: places.get(item.name.removeprefix("test_healthy[").removesuffix("]"), 0))
