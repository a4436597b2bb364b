"""A mesh of two axes: parameters are sharded along the second, and gradients averaged over both."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lockstep.conformance.models import KnownGradient, KnownGradients, NestedWrappedModule

pytestmark = pytest.mark.ranks(4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def hybrid(world, fully_shard, bare, **settings):
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    return fully_shard.shard(bare, mesh=mesh, **settings), mesh


def test_parameters_are_replicated_and_sharded_along_their_axes(world, fully_shard):
    bare = NestedWrappedModule().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model, mesh = hybrid(world, fully_shard, bare)
    for name, p in model.named_parameters():
        assert p.placements == (Replicate(), Shard(0))
        assert p.device_mesh == mesh
        assert torch.equal(p.to_local(), full[name].chunk(2)[mesh.get_local_rank("shard")])


@pytest.mark.parametrize("reduce_dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_a_divide_factor_divides_the_sum_over_both_axes(world, fully_shard, reduce_dtype):
    """torch 2.13 refuses most factors on gloo."""
    policy = fully_shard.precision(reduce_dtype=reduce_dtype)
    model, _ = hybrid(world, fully_shard, KnownGradient(4), **policy)
    model.set_gradient_divide_factor(5.0)
    model(torch.tensor(5.0 * (1 + world.rank), device=world.device)).backward()
    assert model.weight.grad.full_tensor().tolist() == [10.0] * 4


def test_gradients_may_be_reduced_inside_first_and_across_later(world, fully_shard, collectives):
    model, _ = hybrid(world, fully_shard, KnownGradients(4))
    for index in range(3):
        model.set_requires_all_reduce(index == 2)
        before = len(fully_shard.engine.traffic(collectives).reductions)
        model(torch.tensor(2.0**index * (world.rank - 0.5), device=world.device)).backward()
        found = len(fully_shard.engine.traffic(collectives).reductions) - before
        assert found == (3 if index < 2 else 6), collectives  # three groups, along one axis or two
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[7.0] * 4] * 4


def test_a_copy_keeps_the_wait_inside_a_replica(world, fully_shard):
    model, _ = hybrid(world, fully_shard, KnownGradients(4))
    model.set_requires_all_reduce(False)
    copied = copy.deepcopy(model)
    copied(torch.tensor(1.0, device=world.device)).backward()
    assert [p.grad for p in copied.parameters()] == [None] * 4


def test_unsharded_gradients_wait_for_the_reduction_across(world, front, collectives):
    mesh = world.mesh(world.size, 1, names=("replicate", "shard")) if front.shards else None
    model = front.shard(KnownGradients(4), mesh=mesh)
    for index in range(3):
        model.set_requires_all_reduce(index == 2)
        assert {p.grad for p in model.parameters()} == {None}
        assert front.engine.traffic(collectives).reductions == (), collectives
        model(torch.tensor(2.0**index * (world.rank - 0.5), device=world.device)).backward()
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[7.0] * 4] * 4


def test_a_mesh_of_some_ranks_averages_over_those_alone(world, front):
    mesh = world.mesh(2, 2, names=("outer", "inner"))["inner"]
    model = front(KnownGradient(4).to(world.device), mesh=mesh)
    model(torch.tensor(1.0 * world.rank, device=world.device)).backward()
    assert model.weight.grad.full_tensor().tolist() == [0.5 if world.rank < 2 else 2.5] * 4


def test_replicas_have_one_axis(world, replicate):
    with pytest.raises(ValueError, match=r"1-?D|one axis|one dimension"):
        replicate(nn.Linear(4, 4).to(world.device), mesh=world.mesh(2, 2))
