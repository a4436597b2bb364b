"""The faults in tests of MultiProcContinuousTest."""

import faults
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class FaultsTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_killed(self):
        faults.killed(self.rank)

    def test_exits(self):
        faults.exits(self.rank)

    def test_hangs(self):
        faults.hangs(self.rank)

    def test_deadlocks(self):
        faults.deadlocks(self.rank)

    def test_skips(self):
        faults.skips(self.rank)

    def test_leaks(self):
        faults.leaks(self.rank)
