"""Gradient scaling under the composable fronts: all ranks step, or none does."""

import pytest
import torch

from lockstep.assertions import assert_same_across_ranks
from lockstep.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, F32 = torch.float16, torch.float32
INF = float("inf")


def scaled_step(scaler, model, optimizer, gradient):
    """Run one step; return the scale after it."""
    optimizer.zero_grad()
    scaler.scale(model(gradient)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("policy", [(), (F16,), (F16, F32)], ids=["fp32", "fp16", "fp16_reduced_in_fp32"])
@pytest.mark.parametrize("shape", [(1,), (4,)], ids=["one_element", "four"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_inf_of_one_rank_is_skipped_by_all(world, engine, front, policy, shape, bad_rank):
    """pytorch#115710: the flag was read before its all-reduce; #99174: an empty shard did not join."""
    model = front(KnownGradient(*shape).to(world.device), **front.precision(*policy))
    scaler = engine.grad_scaler(model, init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for number in range(5):
        value = INF if number == 1 and world.rank == bad_rank else 1.0 + world.rank
        scale = scaled_step(scaler, model, optimizer, torch.tensor(value, device=world.device))
        found.append((scale, *model.weight.full_tensor().unique().tolist()))
    assert found == [(8.0, -1.5), (4.0, -1.5), (4.0, -3.0), (8.0, -4.5), (8.0, -6.0)]


def test_an_inf_in_one_shard_is_skipped_by_all(world, engine, front):
    model = front.shard(KnownGradients(4))
    scaler = engine.grad_scaler(model, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bad = torch.tensor([1.0, 1.0, 1.0, INF], device=world.device)  # sharded, it is in the last rank's shard
    scales = [scaled_step(scaler, model, optimizer, g) for g in (torch.ones_like(bad), bad)]
    assert scales == [8.0, 4.0]
    assert [p.full_tensor().tolist() for p in model.parameters()] == [[-1.0] * 4] * 4


def test_small_fp16_gradients_survive_by_the_scale(world, engine, front):
    model = front(KnownGradient(3).to(world.device), **front.precision(F16))
    scaler = engine.grad_scaler(model, init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    small = torch.tensor(2.0**-26 * (1 + 2 * world.rank), device=world.device)

    def loss(gradient):
        return model(torch.ones_like(gradient)).float() * gradient  # scaled before it becomes fp16

    scaler.scale(loss(small)).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.full_tensor().tolist() == [2.0**-25] * 3
    scaler.step(optimizer)
    scaler.update()
    assert_same_across_ranks({"weight": model.weight.full_tensor()})
    assert model.weight.full_tensor().tolist() == [-(2.0**-25)] * 3


def test_the_norm_to_clip_by_is_of_unscaled_gradients(world, engine, front):
    model = front(KnownGradient(4).to(world.device))
    scaler = engine.grad_scaler(model, init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.tensor(2.0 * (1 + world.rank), device=world.device))).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert norm.item() == pytest.approx(6.0)
    assert model.weight.grad.full_tensor().tolist() == pytest.approx([0.5] * 4, rel=1e-5)
