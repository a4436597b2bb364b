"""The faults in tests of DeepSpeed's launcher."""

import faults
import pytest
import torch.distributed as dist
from unit.common import DistributedTest


@pytest.mark.parametrize("name", ["killed", "exits", "hangs", "deadlocks", "skips", "leaks"])
class TestFaults(DistributedTest):
    world_size = 2

    def test(self, name):
        getattr(faults, name)(dist.get_rank())
