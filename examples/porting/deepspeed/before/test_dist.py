"""Groups of DeepSpeed's launcher: the claims of DeepSpeed's tests/unit/comm/test_dist.py."""

import pytest
import torch
import torch.distributed as dist
from unit.common import DistributedTest


@pytest.fixture(params=["hello"])
def greeting(request):
    return request.param


class TestSize(DistributedTest):
    world_size = 2

    def test_of_the_class(self):
        assert dist.get_world_size() == 2

    @pytest.mark.world_size(1)
    def test_of_the_method(self):
        assert dist.get_world_size() == 1


@pytest.mark.parametrize("number", [1138])
class TestArguments(DistributedTest):
    world_size = 2

    def test_parameters_and_fixtures(self, number, greeting, color="purple"):
        assert (number, greeting, color) == (1138, "hello", "purple")


@pytest.mark.parametrize("numel", [128, 3])
class TestAllReduce(DistributedTest):
    world_size = 2

    def test_sum_of_ranks(self, numel):
        value = torch.ones(1, numel) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        assert torch.all(value == 3)
