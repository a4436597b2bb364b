"""Hybrid sharding: cut inside a replica, averaged across replicas."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.assertions import assert_named_close, assert_same_across_ranks
from harness.engine import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    groups,
)
from harness.zoo import NestedWrappedModule

pytestmark = pytest.mark.ranks(4)

HYBRID, ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
FSDP, FULL = FullyShardedDataParallel, StateDictType.FULL_STATE_DICT
summon = FSDP.summon_full_params


def mesh(world):
    return world.mesh(2, world.size // 2, names=("replicate", "shard"))


def nested(world, strategy, **arguments):
    torch.manual_seed(world.seed)
    arguments = {"device_mesh": mesh(world), "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} | arguments
    return FullyShardedDataParallel(
        NestedWrappedModule().to(world.device), sharding_strategy=strategy, use_orig_params=True, **arguments
    )


def kept(model, optimizer):
    """Return all that the optimizer keeps on this rank, by parameter and key."""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}


def gradients(model):
    with summon(model, writeback=False, with_grads=True):
        return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", [HYBRID, ZERO2])
def test_gradients_are_those_of_one_model_on_all_batches(world, strategy):
    model = nested(world, strategy)
    torch.manual_seed(world.seed)
    reference = NestedWrappedModule().to(world.device)
    batches = torch.randn(world.size, 4, 8, device=world.device)
    for _ in range(2):
        model(batches[world.rank]).square().mean().backward()
        reference(batches.flatten(0, 1)).square().mean().backward()
    assert_named_close(gradients(model), {name: p.grad for name, p in reference.named_parameters()})
    assert_same_across_ranks(gradients(model))


@pytest.mark.parametrize(("strategy", "gathers"), [(HYBRID, 2), (ZERO2, 1)])
def test_it_gathers_inside_a_replica_and_reduces_inside_and_across(
    world, engine, collectives, strategy, gathers
):
    model = nested(world, strategy)
    model(torch.randn(4, 8, device=world.device)).sum().backward()
    assert {entry.group_size for entry in collectives} == {2}
    traffic = engine.traffic(collectives)
    assert (len(traffic.gathers), traffic.others) == (5 * gathers, ())
    assert Counter(entry.op for entry in traffic.reductions) == {"all_to_all_single": 5, "all_reduce": 5}
    # Across go shards, which are half as large as what is exchanged inside.
    assert 2 * collectives.nbytes("all_reduce") == collectives.nbytes("all_to_all_single")
    assert all(group.local_numel * 2 == group.full_numel for group in groups(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_divides_once_and_sums_beyond_the_range_of_its_dtype(world, dtype):
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, gradient):
            return (self.weight * gradient).sum()

    precision = MixedPrecision(reduce_dtype=dtype)
    model = FullyShardedDataParallel(
        Weight().to(world.device),
        sharding_strategy=HYBRID,
        device_mesh=mesh(world),
        mixed_precision=precision,
    )
    # Their sum, 122,880, is no fp16 number; their mean is.
    model(torch.full((3,), 12288.0 * (world.rank + 1), device=world.device)).backward()
    with summon(model, writeback=False, with_grads=True):
        assert model.weight.grad.tolist() == [30720.0] * 3


def test_ranks_seeded_differently_start_from_rank_zero_with_buffers(world):
    torch.manual_seed(world.rank)
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare[1].running_mean.fill_(world.rank)
    expected = copy.deepcopy(bare.state_dict()) if world.rank == 0 else None
    model = FullyShardedDataParallel(
        bare, sharding_strategy=HYBRID, device_mesh=mesh(world), sync_module_states=True
    )
    state = model.state_dict()
    assert_same_across_ranks(state)
    if expected:
        assert_named_close(state, expected)


def test_the_norm_counts_each_gradient_once(world):
    model = nested(world, HYBRID)
    model(torch.randn(4, 8, device=world.device)).square().sum().backward()
    squares = sum(gradient.double().square().sum().item() for gradient in gradients(model).values())
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(math.sqrt(squares), rel=1e-6)


def test_a_pair_of_groups_says_the_same_as_a_mesh(world):
    of_mesh = mesh(world)
    pair = (of_mesh.get_group("shard"), of_mesh.get_group("replicate"))
    model = nested(world, HYBRID, process_group=pair, device_mesh=None)
    assert [g.local_numel for g in groups(model)] == [g.local_numel for g in groups(nested(world, HYBRID))]


@pytest.mark.parametrize(("per_host", "num_shards"), [(2, 2), (4, 4)])
def test_by_default_a_host_shards_and_hosts_replicate(world, monkeypatch, per_host, num_shards):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))
    before = set(dist.distributed_c10d._pg_names)
    model = nested(world, HYBRID, device_mesh=None)
    assert {group.full_numel // group.local_numel for group in groups(model)} == {num_shards}
    for group in set(dist.distributed_c10d._pg_names) - before:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("only_rank_zero", [False, True])
def test_one_rank_of_the_world_sees_full_parameters_if_told(world, only_rank_zero):
    model = nested(world, HYBRID)
    with summon(model, writeback=False, rank0_only=only_rank_zero):
        seen = {group.state.name for group in groups(model)}
    assert seen == {"SHARDED" if only_rank_zero and world.rank else "SUMMONED"}


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_state_goes_to_one_rank_of_the_world_if_told_and_loads_from_there(world, num_replicas):
    of_all = world.mesh(num_replicas, world.size // num_replicas, names=("replicate", "shard"))
    model, other = (nested(world, HYBRID, device_mesh=of_all) for _ in range(2))
    optimizer, other_optimizer = (torch.optim.Adam(m.parameters()) for m in (model, other))
    model(torch.ones(4, 8, device=world.device) + world.rank).sum().backward()
    optimizer.step()
    alone = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    FSDP.set_state_dict_type(model, FULL, *alone)
    FSDP.set_state_dict_type(other, FULL, *alone)
    state, saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    assert (bool(state), bool(saved)) == (world.rank == 0, world.rank == 0)
    FSDP.optim_state_dict_to_load(other, other_optimizer, saved, load_directly=True)
    assert_named_close(kept(other, other_optimizer), kept(model, optimizer))


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_loading_what_one_rank_of_the_world_was_given_is_refused(world, num_replicas):
    of_all = world.mesh(num_replicas, world.size // num_replicas, names=("replicate", "shard"))
    model = nested(world, HYBRID, device_mesh=of_all)
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    with pytest.raises(RuntimeError, match="some ranks were given nothing to load"):
        model.load_state_dict(model.state_dict())


REFUSED = {
    "one_group": (
        HYBRID,
        lambda world: {"process_group": world.group},
        "HYBRID_SHARD needs a pair of groups",
    ),
    "one_axis": (HYBRID, lambda world: {"device_mesh": world.mesh(4)}, "needs 2 axes .*, got a mesh of 1"),
    "two_axes": (
        ShardingStrategy.FULL_SHARD,
        lambda world: {"device_mesh": mesh(world)},
        "FULL_SHARD needs 1 axes, got a mesh of 2",
    ),
    "both": (
        HYBRID,
        lambda world: {"device_mesh": mesh(world), "process_group": (world.group, world.group)},
        "say the same thing twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_groups_that_do_not_fit_the_strategy_are_refused(world, case):
    strategy, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=strategy, **arguments(world))


@pytest.mark.ranks(2)
def test_a_process_group_without_this_rank_is_refused(world):
    alone = dist.new_group([0])
    if world.rank == 0:
        FullyShardedDataParallel(nn.Linear(2, 2), process_group=alone)
        dist.destroy_process_group(alone)
        return
    with pytest.raises(ValueError, match="process_group: rank 1 is not in it"):
        FullyShardedDataParallel(nn.Linear(2, 2), process_group=alone)
