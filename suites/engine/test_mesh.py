"""Process groups and meshes of the wrapper. suites/core/test_hybrid.py trains with them."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lockstep.conformance.models import NestedWrappedModule
from lockstep.engine import (
    CustomPolicy,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    groups,
)

pytestmark = pytest.mark.ranks(4)

HYBRID = ShardingStrategy.HYBRID_SHARD


def mesh(world):
    return world.mesh(2, world.size // 2, names=("replicate", "shard"))


def nested(world, strategy, **arguments):
    torch.manual_seed(world.seed)
    arguments = {"device_mesh": mesh(world), "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} | arguments
    return FullyShardedDataParallel(
        NestedWrappedModule().to(world.device), sharding_strategy=strategy, use_orig_params=True, **arguments
    )


def test_a_pair_of_groups_is_equivalent_to_a_mesh(world):
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
    world.barrier()  # a rank may not end a group while another still connects to it
    for group in set(dist.distributed_c10d._pg_names) - before:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.parametrize("axes", [2, 1])
def test_states_lie_on_the_mesh_that_the_user_gave(world, kind, axes):
    """pytorch's test_hsdp_dtensor_state_dict.py says so of sharded ones."""
    given = mesh(world) if axes == 2 else world.mesh(4, names=("data",))
    model = nested(world, HYBRID if axes == 2 else ShardingStrategy.FULL_SHARD, device_mesh=given)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8, device=world.device)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        states = list(model.state_dict().values())
        if kind == "SHARDED_STATE_DICT":
            found = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"].values()
            states += [moment for state in found for name, moment in state.items() if name != "step"]
    assert {(state.device_mesh, state.placements) for state in states} == {
        (given, (Replicate(),) * (axes - 1) + (Shard(0),))
    }


@pytest.mark.parametrize("sharded", [mesh, None], ids=["mesh", "groups"])
def test_the_state_of_a_hybrid_model_loads_where_others_shard(world, sharded):
    """A reader of its state need not know if it was made with a mesh or with groups."""
    pair = mesh(world).get_group("shard"), mesh(world).get_group("replicate")
    made = {"device_mesh": mesh(world)} if sharded else {"device_mesh": None, "process_group": pair}
    first = nested(world, HYBRID, **made)
    torch.manual_seed(1)
    second = FullyShardedDataParallel(NestedWrappedModule().to(world.device), use_orig_params=True)
    kind_of, kind = FullyShardedDataParallel.state_dict_type, StateDictType.SHARDED_STATE_DICT
    with kind_of(first, kind), kind_of(second, kind):
        dcp.save(first.state_dict(), checkpoint_id=world.shared_tmp_path)
        state = second.state_dict()
        dcp.load(state, checkpoint_id=world.shared_tmp_path)
        second.load_state_dict(state)
    expected, found = first.state_dict(), second.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("given", ["mesh", "groups"])
def test_a_policy_may_name_other_groups_for_some_modules(world, given):
    whole = {"process_group": world.group, "sharding_strategy": ShardingStrategy.FULL_SHARD}
    policy = CustomPolicy(lambda module: whole if isinstance(module, nn.Linear) else False)
    pair = mesh(world).get_group("shard"), mesh(world).get_group("replicate")
    made = {} if given == "mesh" else {"device_mesh": None, "process_group": pair}
    model = nested(world, HYBRID, auto_wrap_policy=policy, **made)
    shares = {group.name: group.full_numel / group.local_numel for group in groups(model)}
    assert set(shares.values()) == {4.0}


@pytest.mark.parametrize("only_rank_zero", [False, True])
def test_rank0_only_summons_on_one_rank_of_a_hybrid_model(world, only_rank_zero):
    model = nested(world, HYBRID)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=only_rank_zero):
        seen = {group.state.name for group in groups(model)}
    assert seen == {"SHARDED" if only_rank_zero and world.rank else "SUMMONED"}


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
def test_process_groups_that_do_not_fit_the_strategy_are_refused(world, case):
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
