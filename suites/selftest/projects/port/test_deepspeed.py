"""Tests of DeepSpeed's launcher: the input of `python -m lockstep port`."""

import os

import pytest
from unit.common import DistributedTest


@pytest.mark.parametrize("number", [1, 2])
class TestSizes(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = False

    def test_number(self, number):
        assert number in (1, 2)

    @pytest.mark.world_size(4)
    def test_own_size(self, number, color="red"):
        assert int(os.environ["WORLD_SIZE"]) == self.world_size

    def test_directory(self, tmpdir, number):
        with open(os.path.join(tmpdir, "shared"), "a"):
            pass


class TestOnItsOwn(DistributedTest):
    init_distributed = False

    def test_group(self):
        pass
