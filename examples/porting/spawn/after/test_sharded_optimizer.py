"""A sharded optimizer: claims of fairscale's tests/optim/test_oss.py, of torch's optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks(2)


def test_step(world):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 2.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.tensor([world.rank + 1.0])).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size
    optimizer.step()
    torch.testing.assert_close(model.weight.item(), 0.85)
    torch.testing.assert_close(model.bias.item(), 1.9)


def test_sharding(world):
    sizes = [9, 7, 5, 3]
    parameters = [torch.rand(size, 1, requires_grad=True) for size in sizes * world.size]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    mine = optimizer.optim.param_groups[0]["params"]
    assert sum(parameter.numel() for parameter in mine) == sum(sizes)


def test_added_group():
    optimizer = ZeroRedundancyOptimizer([torch.rand(3, 1)], torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": [torch.rand(5, 1)]})
    assert len(optimizer.param_groups) == 2
