"""Groups of ranks: the claims of DeepSpeed's tests/unit/comm/test_dist.py."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(params=["hello"])
def greeting(request):
    return request.param


@pytest.mark.ranks(2)
class TestSize:
    def test_of_the_class(self):
        assert dist.get_world_size() == 2

    @pytest.mark.ranks(1)
    def test_of_the_method(self):
        assert dist.get_world_size() == 1


@pytest.mark.parametrize("number", [1138])
@pytest.mark.ranks(2)
class TestArguments:
    def test_parameters_and_fixtures(self, number, greeting, color="purple"):
        assert (number, greeting, color) == (1138, "hello", "purple")


@pytest.mark.parametrize("numel", [128, 3])
@pytest.mark.ranks(2)
class TestAllReduce:
    def test_sum_of_ranks(self, numel):
        value = torch.ones(1, numel) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        assert torch.all(value == 3)
