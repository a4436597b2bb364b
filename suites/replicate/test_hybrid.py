"""A mesh of two axes: parameters are cut along the second, and gradients averaged over both."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from harness.assertions import assert_same_across_ranks, assert_sharded_parity
from harness.assertions.closeness import EXACT
from harness.conformance.models import KnownGradient, KnownGradients, NestedWrappedModule

pytestmark = pytest.mark.ranks(4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 2), (2, 1)]


def hybrid(world, fully_shard, bare, shape=None, **settings):
    mesh = world.mesh(*(shape or (2, world.size // 2)), names=("replicate", "shard"))
    units = getattr(bare, "units", ())
    return fully_shard.apply(bare.to(world.device), units, mesh=mesh, **settings), mesh


def check_parity(world, fully_shard, shape=None, **settings):
    """Train three steps beside an unsharded model that sees all ranks' batches together."""
    reference = NestedWrappedModule().to(world.device)
    model, _ = hybrid(world, fully_shard, copy.deepcopy(reference), shape, **settings)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    generator = torch.Generator().manual_seed(world.seed)
    for batch in torch.randn(3, 2 * world.size, 8, generator=generator).to(world.device):
        reference(batch).square().mean().backward()
        model(batch.chunk(world.size)[world.rank]).square().mean().backward()
        assert_sharded_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_sharded_parity(model, reference)


@pytest.mark.parametrize("reshard_after_forward", [None, True, False], ids=str)
def test_it_learns_what_an_unsharded_model_learns(world, fully_shard, reshard_after_forward):
    check_parity(world, fully_shard, reshard_after_forward=reshard_after_forward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_learns_the_same_with_one_replica_or_one_shard(world, fully_shard, shape):
    check_parity(world, fully_shard, shape)


def test_parameters_are_replicated_along_the_first_axis_and_cut_along_the_second(world, fully_shard):
    bare = NestedWrappedModule().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model, mesh = hybrid(world, fully_shard, bare)
    for name, p in model.named_parameters():
        assert p.placements == (Replicate(), Shard(0))
        assert p.device_mesh == mesh
        assert torch.equal(p.to_local(), full[name].chunk(2)[mesh.get_local_rank("shard")])


def test_replicas_are_bit_equal_after_steps(world, fully_shard, step):
    model, mesh = hybrid(world, fully_shard, NestedWrappedModule(), **fully_shard.precision(BF16))
    start = [p.to_local().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), start, strict=True))
    assert_same_across_ranks(dict(model.named_parameters()), mesh.get_group("replicate"))


def test_reduce_dtype_holds_inside_a_replica_and_across(world, fully_shard):
    model, _ = hybrid(world, fully_shard, KnownGradients(4), **fully_shard.precision(F16, F32))
    # One of four ranks adds the last bit that 1 has in fp16; the mean needs two bits more.
    model(torch.tensor(1 + (world.rank == 3) * 2**-10, device=world.device, dtype=F16)).backward()
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[1 + 2**-12] * 4] * 4


@pytest.mark.parametrize("reduce_dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_a_factor_that_is_told_divides_the_sum_over_both_axes(world, fully_shard, reduce_dtype):
    """torch 2.13 refuses most factors on gloo."""
    policy = fully_shard.precision(reduce_dtype=reduce_dtype)
    model, _ = hybrid(world, fully_shard, KnownGradient(4), **policy)
    model.set_gradient_divide_factor(5.0)
    model(torch.tensor(5.0 * (1 + world.rank), device=world.device)).backward()
    assert model.weight.grad.full_tensor().tolist() == [10.0] * 4


def test_accumulating_without_sync_is_exactly_twice(world, fully_shard, step):
    model, _ = hybrid(world, fully_shard, NestedWrappedModule())
    step(model)
    once = {name: 2 * p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        step(model)
    twice = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    torch.testing.assert_close(twice, once, **EXACT._asdict())
    assert all(gradient.any() for gradient in once.values())


def test_gradients_may_be_reduced_inside_a_replica_at_first_and_across_later(world, fully_shard, collectives):
    model, _ = hybrid(world, fully_shard, KnownGradients(4))
    for index in range(3):
        model.set_requires_all_reduce(index == 2)
        before = len(fully_shard.engine.traffic(collectives).reductions)
        model(torch.tensor(2.0**index * (world.rank - 0.5), device=world.device)).backward()
        found = len(fully_shard.engine.traffic(collectives).reductions) - before
        assert found == (3 if index < 2 else 6), collectives  # three groups, along one axis or two
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[7.0] * 4] * 4


def test_a_copy_waits_inside_a_replica_as_it_was_told(world, fully_shard):
    model, _ = hybrid(world, fully_shard, KnownGradients(4))
    model.set_requires_all_reduce(False)
    copied = copy.deepcopy(model)
    copied(torch.tensor(1.0, device=world.device)).backward()
    assert [p.grad for p in copied.parameters()] == [None] * 4


def test_where_nothing_is_cut_gradients_wait_until_they_are_reduced_across(world, front, collectives):
    mesh = world.mesh(world.size, 1, names=("replicate", "shard")) if front.shards else None
    model = front.apply(KnownGradients(4).to(world.device), KnownGradients.units, mesh=mesh)
    for index in range(3):
        model.set_requires_all_reduce(index == 2)
        assert {p.grad for p in model.parameters()} == {None}
        assert front.engine.traffic(collectives).reductions == (), collectives
        model(torch.tensor(2.0**index * (world.rank - 0.5), device=world.device)).backward()
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[7.0] * 4] * 4


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_to_clip_by_is_the_unsharded_one(world, fully_shard, norm_type):
    """pytorch#88955: the norm was counted once for each replica."""
    model, _ = hybrid(world, fully_shard, KnownGradient(8))
    model(torch.arange(8.0, device=world.device) * (world.rank - 0.5)).backward()
    expected = torch.linalg.vector_norm(torch.arange(8.0), norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type).full_tensor()
    torch.testing.assert_close(norm.cpu(), expected)
    torch.testing.assert_close(model.weight.grad.full_tensor().cpu(), torch.arange(8.0) / expected)


def test_it_gathers_inside_a_replica_and_reduces_inside_then_across(world, fully_shard, collectives, step):
    model, _ = hybrid(world, fully_shard, NestedWrappedModule())
    step(model)
    traffic = fully_shard.engine.traffic(collectives)
    numel = (76, 272, 80, 68)  # of the groups: even for two ranks
    assert sorted(e.nbytes for e in traffic.gathers) == sorted(2 * n for n in (*numel, *numel[1:])), (
        collectives
    )
    inside = [e.nbytes for e in traffic.reductions if e.nbytes // 4 in numel]
    across = [e.nbytes for e in traffic.reductions if e.nbytes // 4 not in numel]
    assert sorted(inside) == sorted(4 * n for n in numel), collectives
    assert sorted(across) == sorted(2 * n for n in numel), collectives
    assert {e.group_size for e in (*traffic.gathers, *traffic.reductions)} == {2}
    assert traffic.others == (), collectives


def test_a_mesh_of_some_ranks_averages_over_those_alone(world, front):
    mesh = world.mesh(2, 2, names=("outer", "inner"))["inner"]
    model = front(KnownGradient(4).to(world.device), mesh=mesh)
    model(torch.tensor(1.0 * world.rank, device=world.device)).backward()
    assert model.weight.grad.full_tensor().tolist() == [0.5 if world.rank < 2 else 2.5] * 4


def test_replicas_have_one_axis(world, replicate):
    with pytest.raises(ValueError, match=r"1-?D|one axis|one dimension"):
        replicate(nn.Linear(4, 4).to(world.device), mesh=world.mesh(2, 2))
