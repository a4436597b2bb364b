"""Fixtures of the engine's unit tests: a wrapped model and its input."""

import pytest


@pytest.fixture
def batch(world):
    """Four rows of eight features, different on each rank."""
    import torch

    return torch.arange(32.0, device=world.device).view(4, 8) * (world.rank + 1)


@pytest.fixture
def nested(world):
    """Make a wrapped `NestedWrappedModule`, equal on all ranks, with arguments of the wrapper."""
    import torch

    from lockstep.conformance.models import NestedWrappedModule
    from lockstep.engine import FullyShardedDataParallel

    def make(**arguments):
        torch.manual_seed(0)
        return FullyShardedDataParallel(NestedWrappedModule().to(world.device), **arguments)

    return make
