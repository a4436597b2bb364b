"""One step of the engine beside it, healthy or with a fault on rank 1."""

import pytest
import torch
from engine import Engine


def train(world, fault, steps=1):
    engine = Engine(world, fault=fault)
    model = engine.model()
    for _ in range(steps):
        engine.step(model, torch.ones(2, 8))
    return engine.save(model)


@pytest.mark.ranks(2, 4)
def test_healthy(world):
    assert len(train(world, "")) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "fault", ["waits_for_all", "other_order", "dies_in_backward", "crashes_in_backward", "other_dtype"]
)
def test_fault(world, fault):
    train(world, fault)
    world.barrier()


@pytest.mark.ranks(2)
def test_exception(world):
    train(world, "")
    assert world.rank == 0
