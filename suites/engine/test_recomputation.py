"""Segments that backward computes again inside of a unit, after the last gradient of the unit has come."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, named_gradients
from lockstep.engine import FullyShardedDataParallel, fully_shard

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.parametrize("front", ["fully_shard", "FullyShardedDataParallel"]),
    pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"]),
]


class Late(nn.Module):
    """A layer that is used after a checkpointed `segment(model, x)`, too."""

    def __init__(self, segment, use_reentrant):
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.segment, self.use_reentrant = segment, use_reentrant

    def forward(self, x):
        return self.layer(checkpoint(self.segment, self, x, use_reentrant=self.use_reentrant))


def shard(front, model):
    if front == "fully_shard":
        for module in (model.inner, model):
            fully_shard(module)
        return model
    model.inner = FullyShardedDataParallel(model.inner, use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


def full_gradients(model):
    if not isinstance(model, FullyShardedDataParallel):
        return named_gradients(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def backward(model, device):
    x = torch.arange(8.0, device=device).view(2, 4).requires_grad_()
    model(x).square().sum().backward()


def unheard(model, x):
    model.layer(x)
    return model.inner(x).tanh()


def with_other_weights(model, x):
    """Call the layer with weights of another model: the unit has no part in it."""
    others = {"weight": torch.full((4, 4), 0.1, device=x.device), "bias": torch.ones(4, device=x.device)}
    return model.inner(functional_call(model.layer, others, (x,))).tanh()


@pytest.mark.parametrize("segment", [unheard, with_other_weights])
def test_a_segment_calls_a_layer_that_has_all_its_gradients(world, front, use_reentrant, segment):
    bare = Late(segment, use_reentrant).to(world.device)
    model = shard(front, copy.deepcopy(bare))
    for each in (bare, model):
        backward(each, world.device)
    assert_named_close(full_gradients(model), named_gradients(bare))


def test_a_recomputation_that_raises_leaves_nothing_behind(world, front, use_reentrant):
    bare, calls = Late(unheard, use_reentrant).to(world.device), []

    def raises_at_the_second_call(model, x):
        calls.append(x)
        if len(calls) == 2:
            raise ValueError("recomputed")
        return unheard(model, x)

    model = shard(front, copy.deepcopy(bare))
    late = next(module for module in model.modules() if isinstance(module, Late))
    late.segment = raises_at_the_second_call
    with pytest.raises(ValueError, match="recomputed"):
        backward(model, world.device)
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.zero_grad()
    for each in (bare, model):
        backward(each, world.device)
    assert_named_close(full_gradients(model), named_gradients(bare))
