"""Adopted classes of several kinds and sizes among tests on ranks and tests without."""

import os
import unittest

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)


def total():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return int(tensor)


class Base(MultiProcessTestCase):
    size = 2

    @property
    def world_size(self):
        return self.size

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )


class TestTwo(Base):
    def test_total(self):
        self.init()
        self.assertEqual(total(), 2)

    def test_fails(self):
        self.init()
        if self.rank == 1:
            raise ValueError("of rank 1")
        dist.barrier()

    def test_state(self):
        self.assertNotIn("LEFT", os.environ)
        os.environ["LEFT"] = "1"

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(self.rank, 0)


class TestThree(Base):
    size = 3

    def test_total(self):
        self.init()
        self.assertEqual(total(), 3)


class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_total(self):
        self.assertEqual(total(), 2)

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_again(self):
        self.assertEqual(total(), 2)


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_size(self):
        self.assertEqual(dist.get_world_size(), 2)


@pytest.mark.ranks(2)
def test_on_ranks(world):
    assert "LEFT" not in os.environ
    assert world.gather(world.rank) == [0, 1]
    assert total() == 2


def test_without_ranks():
    assert "RANK" not in os.environ
