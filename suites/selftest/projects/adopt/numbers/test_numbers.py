"""Tests that hang after others of the same world have used its group, or one of the same name."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase


def reduce(times):
    for _ in range(times):
        dist.all_reduce(torch.ones(1))


class TestOwn(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_four(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        reduce(4)


@pytest.mark.ranks(2)
def test_on_ranks_hangs(world):
    reduce(2 + (world.rank == 0))


class TestKept(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_1_four(self):
        reduce(4)

    def test_2_hangs(self):
        reduce(1 + (self.rank == 1))
