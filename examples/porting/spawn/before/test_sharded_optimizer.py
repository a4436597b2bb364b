"""A sharded optimizer: claims of fairscale's tests/optim/test_oss.py, of torch's optimizer."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer

WORLD_SIZE = 2


def init_group(rank, world_size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)


def run_step(rank, world_size, path):
    init_group(rank, world_size, path)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 2.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.tensor([rank + 1.0])).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    torch.testing.assert_close(model.weight.item(), 0.85)
    torch.testing.assert_close(model.bias.item(), 1.9)
    dist.destroy_process_group()


def test_step():
    path = tempfile.mkstemp()[1]
    mp.spawn(run_step, args=(WORLD_SIZE, path), nprocs=WORLD_SIZE, join=True)


def run_sharding(rank, world_size, path):
    init_group(rank, world_size, path)
    sizes = [9, 7, 5, 3]
    parameters = [torch.rand(size, 1, requires_grad=True) for size in sizes * world_size]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    mine = optimizer.optim.param_groups[0]["params"]
    assert sum(parameter.numel() for parameter in mine) == sum(sizes)
    dist.barrier()  # a rank that ends would break connections that others still make
    dist.destroy_process_group()


def test_sharding():
    path = tempfile.mkstemp()[1]
    mp.spawn(run_sharding, args=(WORLD_SIZE, path), nprocs=WORLD_SIZE, join=True)


def run_added_group(rank, world_size, path):
    init_group(rank, world_size, path)
    optimizer = ZeroRedundancyOptimizer([torch.rand(3, 1)], torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": [torch.rand(5, 1)]})
    assert len(optimizer.param_groups) == 2
    dist.barrier()  # a rank that ends would break connections that others still make
    dist.destroy_process_group()


def test_added_group():
    path = tempfile.mkstemp()[1]
    mp.spawn(run_added_group, args=(WORLD_SIZE, path), nprocs=WORLD_SIZE, join=True)
