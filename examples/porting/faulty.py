"""The faults in tests on ranks."""

import faults
import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("fault", ["killed", "exits", "hangs", "deadlocks", "skips", "leaks"])
def test_fault(world, fault):
    getattr(faults, fault)(world.rank)


def test_healthy(world):
    world.barrier()
