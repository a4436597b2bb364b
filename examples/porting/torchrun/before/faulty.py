"""The faults under `torchrun -m pytest`."""

import faults
import group
import pytest


@pytest.mark.parametrize("name", ["killed", "exits", "hangs", "deadlocks", "skips", "leaks"])
def test(name):
    group.initialize()
    getattr(faults, name)(group.rank)
