"""A collective in each phase of a step, on two backends; and a failure where no call is recorded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn


class Layer(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        dist.all_reduce(out.detach().clone())
        out.register_hook(self.in_backward)
        return out

    def in_backward(self, grad):
        dist.broadcast(grad.clone(), 0)


class Optimizer(torch.optim.Optimizer):
    def step(self):
        dist.barrier()


@pytest.fixture
def started(world):
    dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.ranks(2, backend=name)) for name in ("gloo", "shm")]
)
def test_phases(world, started, backend):
    layer = Layer(2, 2)
    loss = layer(torch.ones(1, 2)).sum()
    dist.all_reduce(loss.detach().clone())
    loss.backward()
    Optimizer(layer.parameters(), {}).step()


@pytest.mark.ranks(2, backend="fake")
def test_fake(world):
    dist.all_reduce(torch.ones(2))
    assert world.rank
