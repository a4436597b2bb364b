"""Hybrid sharding beyond what every engine shows: which groups it takes, and state dicts in other layouts.

The rest is in suites/core/test_hybrid.py.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from harness.assertions import assert_named_close
from harness.assertions.closeness import EXACT
from harness.conformance import ShardSpec
from harness.conformance.models import NestedWrappedModule, UnevenShapes
from harness.engine import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    groups,
)

pytestmark = pytest.mark.ranks(4)

HYBRID, ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
front = FullyShardedDataParallel


def mesh(world):
    return world.mesh(2, world.size // 2, names=("replicate", "shard"))


def nested(world, strategy, **arguments):
    torch.manual_seed(world.seed)
    arguments = {"device_mesh": mesh(world), "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} | arguments
    return FullyShardedDataParallel(
        NestedWrappedModule().to(world.device), sharding_strategy=strategy, use_orig_params=True, **arguments
    )


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
    with front.summon_full_params(model, writeback=False, rank0_only=only_rank_zero):
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


# state


class Training:
    """A model and its optimizer, some steps on, cut over the world or the first ``size`` ranks of it.

    Every rank trains on the same batches: sums of two and four equal gradients and their means are exact.
    """

    def __init__(self, world, engine, strategy, size, steps, **spec):
        axes, self.device = mesh(world), world.device
        pair = axes.get_group("shard"), axes.get_group("replicate")
        self.group = None if size == world.size else pair[0]
        torch.manual_seed(steps)
        group = pair if "HYBRID" in strategy else self.group
        spec = ShardSpec(strategy, units=UnevenShapes.units, process_group=group, device=self.device, **spec)
        self.model = engine.shard(UnevenShapes(), spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for number in range(steps):
            self.step(number)

    def step(self, number):
        batch = UnevenShapes.batch(torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        UnevenShapes.loss(self.model(batch.to(self.device))).backward()
        self.optimizer.step()

    def save(self, kind=FULL, *configs):
        with front.state_dict_type(self.model, kind, *configs):
            optimizer = front.optim_state_dict(self.model, self.optimizer)
            return {"model": self.model.state_dict(), "optimizer": optimizer}

    def load(self, state, kind=FULL):
        with front.state_dict_type(self.model, kind):
            self.model.load_state_dict(state["model"])
            front.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"], load_directly=True)

    def tensors(self):
        state = self.save()
        moments = state["optimizer"]["state"].items()
        return state["model"] | {f"{name} {key}": v for name, one in moments for key, v in one.items()}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("strategy", "use_orig_params"), [(HYBRID, False), (ZERO2, True)])
@pytest.mark.parametrize("kind", StateDictType)
def test_training_resumes_bit_equal_from_each_kind_of_state(world, engine, strategy, use_orig_params, kind):
    saving, loading = (
        Training(world, engine, strategy.name, world.size, steps, use_orig_params=use_orig_params)
        for steps in (2, 3)
    )
    loading.load(saving.save(kind), kind)
    assert_named_close(loading.tensors(), saving.tensors(), EXACT)
    for training in (saving, loading):
        training.step(2)
    assert_named_close(loading.tensors(), saving.tensors(), EXACT)


def through_files(world, saving, make, path):
    """Save and load sharded state with torch's checkpoint, each on the ranks that have a model."""
    if saving:
        dcp.save(saving.save(SHARDED), checkpoint_id=path, process_group=saving.group)
    world.barrier()
    loading = make()
    if loading:
        state = loading.save(SHARDED)
        dcp.load(state, checkpoint_id=path, process_group=loading.group)
        loading.load(state, SHARDED)
    return loading


def through_dict(world, saving, make, path):
    """Hand the full state of rank 0 over."""
    state = world.gather(saving and saving.save())[0]
    loading = make()
    if loading:
        loading.load(state)
    return loading


HYBRID_4, FULL_4, FULL_2 = ("HYBRID_SHARD", 4), ("FULL_SHARD", 4), ("FULL_SHARD", 2)
LAYOUTS = ((HYBRID_4, FULL_4), (HYBRID_4, FULL_2), (FULL_4, HYBRID_4), (FULL_2, HYBRID_4))
# Every two of layouts, way and flag meet; all three at once would take twice the time.
CARRIED = [
    (saved, loaded, carry, (row + column) % 2 == 1)
    for row, (saved, loaded) in enumerate(LAYOUTS)
    for column, carry in enumerate((through_files, through_dict))
]


@pytest.mark.parametrize(
    ("saved", "loaded", "carry", "use_orig_params"),
    CARRIED,
    ids=lambda value: f"{value[0]}_{value[1]}" if isinstance(value, tuple) else None,
)
def test_training_resumes_bit_equal_in_another_layout(world, engine, saved, loaded, carry, use_orig_params):
    def make(strategy, size, steps, use_orig_params):
        if world.rank < size:
            return Training(world, engine, strategy, size, steps, use_orig_params=use_orig_params)
        mesh(world)  # all ranks make its groups
        return None

    saving = make(*saved, 2, use_orig_params)
    path = world.shared_tmp_path / "checkpoint"
    loading = carry(world, saving, lambda: make(*loaded, 3, not use_orig_params), path)
    for number in (None, 2):
        for training in (saving, loading):
            if training and number:
                training.step(number)
        found = world.gather([training and training.tensors() for training in (saving, loading)])
        for rank in range(loaded[1]):
            assert_named_close(found[rank][1], found[0][0], EXACT)


@pytest.mark.ranks(2, 4)
def test_one_rank_of_the_world_gets_state_and_gives_it_back_if_told(world, engine):
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    saving = Training(world, engine, HYBRID.name, world.size, 2)
    state = saving.save(FULL, *configs)
    assert [bool(part) for part in state.values()] == [world.rank == 0] * 2
    expected = saving.save()["optimizer"]["state"]
    loading = Training(world, engine, HYBRID.name, world.size, 3)
    with front.state_dict_type(loading.model, FULL, *configs):
        front.optim_state_dict_to_load(
            loading.model, loading.optimizer, state["optimizer"], load_directly=True
        )
    for name, moments in loading.save()["optimizer"]["state"].items():
        assert_named_close(moments, expected[name], EXACT)


def test_a_model_of_which_one_rank_alone_has_state_is_not_loaded(world, engine):
    config = FullStateDictConfig(rank0_only=True)
    model = Training(world, engine, HYBRID.name, world.size, 0).model
    with front.state_dict_type(model, FULL, config):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="with rank0_only some ranks were given nothing to load"):
            model.load_state_dict(state, strict=False)
