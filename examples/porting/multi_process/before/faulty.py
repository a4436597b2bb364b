"""The faults in tests of MultiProcessTestCase."""

import faults
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class FaultsTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _fault(self, name):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        getattr(faults, name)(self.rank)

    def test_killed(self):
        self._fault("killed")

    def test_exits(self):
        self._fault("exits")

    def test_hangs(self):
        self._fault("hangs")

    def test_deadlocks(self):
        self._fault("deadlocks")

    def test_skips(self):
        self._fault("skips")

    def test_leaks(self):
        self._fault("leaks")
