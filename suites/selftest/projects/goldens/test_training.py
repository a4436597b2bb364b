"""Trainings by hand that are held to goldens; each changes if `CHANGED` is in the environment."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.assertions import named_gradients, named_parameters

pytestmark = pytest.mark.ranks(2)


def train(world, run, change):
    change = change if "CHANGED" in os.environ else ""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(8.0).view(2, 4) / 8 + world.rank).square().mean()
        loss.backward()
        for parameter in model.parameters():
            if change == "traffic" and parameter.dim() == 1:
                dist.all_reduce(parameter.grad)
            dist.all_reduce(parameter.grad)
        if change == "little":
            model[2].weight.grad *= 1 + 1e-6
        if change == "much":
            model[2].weight.grad *= 2
        run.record("loss", loss)
        run.record("gradients", named_gradients(model))
        optimizer.step()
    run.record("parameters", named_parameters(model))


def test_traffic(world, golden):
    with golden("traffic") as run:
        train(world, run, "traffic")


def test_bits(world, golden):
    with golden("bits") as run:
        train(world, run, "little")


def test_tolerance(world, golden):
    with golden("tolerance", torch.float32) as run:
        train(world, run, "little")


def test_beyond_tolerance(world, golden):
    with golden("beyond", torch.float32) as run:
        train(world, run, "much")


@pytest.mark.ranks(1, 2)
def test_sizes(world, golden):
    with golden("sizes") as run:
        run.record("size", world.size)
