"""Forwards inside the transforms of torch.func, and the backwards that follow them outside."""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close

pytestmark = [
    pytest.mark.ranks(2),
    # torch makes its forward-mode formulas with torch.jit.script, which it deprecates.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]

WAYS = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], "use_orig_params": [False, True]}


class Layers(nn.Sequential):
    """A unit and a layer of the root."""

    units = ("0",)

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def derivative(module, x):
    """Return the output and its derivative along a direction, added."""
    return sum(each.square().sum() for each in torch.func.jvp(module, (x,), (torch.ones_like(x),)))


def mapped(module, x):
    return torch.vmap(module)(x).square().sum()


@pytest.mark.parametrize("transform", [derivative, mapped])
def test_a_forward_inside_of_a_transform_trains(world, engine, shard, run_subtests, transform):
    """Also the first one, and a plain one after it."""

    def claim(**spec):
        torch.manual_seed(0)
        reference = Layers().to(world.device)
        model = shard(copy.deepcopy(reference), **spec)
        x = torch.arange(16.0, device=world.device).view(2, 8) / 16
        for compute in (transform, lambda module, x: module(x).square().sum(), transform):
            engine.backward(model, compute(model, x))
            compute(reference, x).backward()
        assert_named_close(engine.full_gradients(model), gradients(reference))

    run_subtests(WAYS, claim)
