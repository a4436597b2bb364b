"""Clipping and loss scaling of gradients over the axes of data and tensor parallelism."""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.conformance.models import TensorParallelModel

pytestmark = pytest.mark.ranks(4)

INF = float("inf")
SHAPES = pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2)], ids=["2x2", "2x1x2", "1x2x2"])


@pytest.fixture
def models(world, grid):
    """Return a function that shards a model over a grid, and gives both models the same gradients."""

    def models(front, shape, factor=1.0):
        torch.manual_seed(world.seed)
        reference, axes = TensorParallelModel().to(world.device), grid(*shape)
        model = front.shard(copy.deepcopy(reference).parallelize(axes.tensor, "sequence"), mesh=axes.data)
        batch = reference.batch(torch.Generator().manual_seed(0)).to(world.device)
        (factor * reference(batch).square().mean()).backward()
        (factor * model(axes.own(batch)).square().mean()).backward()
        return reference, model

    return models


@SHAPES
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_the_norm_is_that_of_the_unsharded_model(fully_shard, models, shape, norm_type):
    reference, model = models(fully_shard, shape)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    found = fully_shard.clip_grad_norm_(model, 0.01, norm_type)
    assert_named_close({"norm": found}, {"norm": expected})
    assert_sharded_parity(model, reference)


def test_the_norm_of_replicas_is_that_of_the_unsharded_model(replicate, models):
    reference, model = models(replicate, (2, 2))
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert_named_close({"norm": replicate.clip_grad_norm_(model, 0.01)}, {"norm": expected})
    assert_sharded_parity(model, reference)


@SHAPES
def test_a_scaler_unscales_and_steps(engine, fully_shard, models, shape):
    reference, model = models(fully_shard, shape)
    start = fully_shard.full_parameters(model)
    scaler = engine.grad_scaler(model, init_scale=8.0)
    scaler.scale(torch.zeros((), device=next(reference.parameters()).device))  # makes the scale
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    expected = {name: start[name] - gradients[name] for name in start}
    assert_named_close(fully_shard.full_parameters(model), expected)


@SHAPES
@pytest.mark.parametrize("bad_rank", [0, 1, 2, 3])
def test_an_inf_on_one_rank_stops_the_step_of_all(world, engine, fully_shard, models, shape, bad_rank):
    reference, model = models(fully_shard, shape)
    start = fully_shard.full_parameters(model)
    scaler = engine.grad_scaler(model, init_scale=8.0)
    scaler.scale(torch.zeros((), device=next(reference.parameters()).device))  # makes the scale
    if world.rank == bad_rank:
        model.blocks[0].up.weight.grad.to_local()[0] = INF
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_named_close(fully_shard.full_parameters(model), start)
