"""Training that resumes from a checkpoint at another world size, with other units or another strategy."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec
from lockstep.conformance.models import UnevenShapes
from lockstep.engine import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

pytestmark = pytest.mark.ranks(3)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
RANK0_ONLY = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
front = FullyShardedDataParallel


class Training:
    """A model and its optimizer after some steps; every rank trains on the same batches.

    Sums of one, two and four equal gradients, and their means, are exact.
    """

    def __init__(self, engine, world, group, steps, units=UnevenShapes.units, **spec):
        self.device, self.group = world.device, None if isinstance(group, tuple) else group
        torch.manual_seed(steps)
        spec = ShardSpec(units=units, process_group=group, device=self.device, **spec)
        self.model = engine.shard(UnevenShapes(), spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for number in range(steps):
            self.step(number)

    def step(self, number):
        batch = UnevenShapes.batch(torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        UnevenShapes.loss(self.model(batch.to(self.device))).backward()
        self.optimizer.step()

    def state(self, kind=FULL, *configs):
        with front.state_dict_type(self.model, kind, *configs):
            optimizer = front.optim_state_dict(self.model, self.optimizer)
            return {"model": self.model.state_dict(), "optimizer": optimizer}

    def load(self, state, kind=FULL):
        with front.state_dict_type(self.model, kind):
            self.model.load_state_dict(state["model"])
        self.load_optimizer(state, kind)

    def load_optimizer(self, state, kind=FULL, *configs):
        with front.state_dict_type(self.model, kind, *configs):
            front.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"], load_directly=True)

    def tensors(self):
        state = self.state()
        moments = state["optimizer"]["state"].items()
        return state["model"] | {f"{name} {key}": v for name, one in moments for key, v in one.items()}


def through_files(world, saving, make):
    """Save and load sharded state with torch's checkpoint, on the ranks that have a model."""
    path = world.shared_tmp_path / "checkpoint"
    if saving:
        dcp.save(saving.state(SHARDED), checkpoint_id=path, process_group=saving.group)
    world.barrier()
    loading = make()
    if loading:
        state = loading.state(SHARDED)
        dcp.load(state, checkpoint_id=path, process_group=loading.group)
        loading.load(state, SHARDED)
    return loading


def through_dict(world, saving, make):
    """Pass the full state of rank 0 to all ranks that have a model."""
    state = world.gather(saving and saving.state())[0]
    loading = make()
    if loading:
        loading.load(state)
    return loading


def gather_tensors(world, *trainings):
    """Return the tensors of all trainings on all ranks, None on ranks without that model."""
    return world.gather([training and training.tensors() for training in trainings])


# another world size


@pytest.fixture
def groups(world):
    """Process groups of the first rank, the first two and all three, by size."""
    made = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    yield made
    world.barrier()
    for size, group in made.items():
        if world.rank < size:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_training_saved_on_one_rank_resumes_on_three(world, engine, groups, strategy):
    saving = Training(engine, world, groups[1], 2, use_orig_params=True) if world.rank == 0 else None
    state = world.gather(saving and saving.state())[0]
    loading = Training(engine, world, groups[3], 3, strategy=strategy, offload=True)
    loading.load(state)
    expected = world.gather(saving and saving.tensors())[0]
    assert_named_close(loading.tensors(), expected, EXACT)


def test_local_state_of_another_world_size_is_refused(world, engine, groups):
    saving = Training(engine, world, groups[2], 1) if world.rank < 2 else None
    state = world.gather(saving and saving.state(LOCAL))[min(world.rank, 1)]
    loading = Training(engine, world, groups[3], 2)
    refused = "loads on the same rank, world size and wrapping only"
    with front.state_dict_type(loading.model, LOCAL):
        with pytest.raises(RuntimeError, match=refused):
            loading.model.load_state_dict(state["model"])
        with pytest.raises(ValueError, match=refused):
            front.optim_state_dict_to_load(loading.model, loading.optimizer, state["optimizer"])


@pytest.mark.ranks(2)
def test_local_optimizer_state_of_torchs_checkpoint_is_refused(world, engine):
    """It has the plain tensors of one rank, and that rank's marks."""
    saving, loading = (Training(engine, world, None, steps) for steps in (1, 2))
    state = saving.state(LOCAL)
    dcp.save(state["optimizer"], checkpoint_id=world.shared_tmp_path)
    state = loading.state(LOCAL)
    dcp.load(state["optimizer"], checkpoint_id=world.shared_tmp_path)
    refused = ""
    try:
        loading.load_optimizer(state, LOCAL)
    except ValueError as error:
        refused = str(error)
    assert any("loads on the same rank, world size and wrapping only" in e for e in world.gather(refused))


def test_a_dtensor_of_other_ranks_is_refused_where_unreadable(world, engine, groups):
    model = Training(engine, world, groups[3], 0).model
    mesh = DeviceMesh("cpu", [0, 1])
    bias = DTensor.from_local(torch.ones(5), mesh, [Replicate()], run_check=False)
    refused = pytest.raises(ValueError, match=r"'first.bias' is a DTensor over .* not among its ranks")
    with refused if world.rank == 2 else nullcontext():
        model.load_state_dict(model.state_dict() | {"first.bias": bias})


# hybrid strategies


def shard_and_replicate(world):
    """Return process groups of two replicas."""
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    return mesh.get_group("shard"), mesh.get_group("replicate")


def hybrid(engine, world, steps, strategy="HYBRID_SHARD", **spec):
    return Training(engine, world, shard_and_replicate(world), steps, strategy=strategy, **spec)


HYBRID_4, FULL_4, FULL_2 = ("HYBRID_SHARD", 4), ("FULL_SHARD", 4), ("FULL_SHARD", 2)
LAYOUTS = ((HYBRID_4, FULL_4), (HYBRID_4, FULL_2), (FULL_4, HYBRID_4), (FULL_2, HYBRID_4))
# Every two of layouts, way and flag meet; all three at once would take twice the time.
CARRIED = [
    (saved, loaded, carry, (row + column) % 2 == 1)
    for row, (saved, loaded) in enumerate(LAYOUTS)
    for column, carry in enumerate((through_files, through_dict))
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saved", "loaded", "carry", "use_orig_params"),
    CARRIED,
    ids=lambda value: f"{value[0]}_{value[1]}" if isinstance(value, tuple) else None,
)
def test_hybrid_training_resumes_bit_equal_at_another_layout(
    world, engine, saved, loaded, carry, use_orig_params
):
    def make(strategy, size, steps, **spec):
        pair = shard_and_replicate(world)  # all ranks make its groups
        if world.rank >= size:
            return None
        group = {HYBRID_4: pair, FULL_4: None, FULL_2: pair[0]}[strategy, size]
        return Training(engine, world, group, steps, strategy=strategy, **spec)

    saving = make(*saved, 2, use_orig_params=use_orig_params)
    loading = carry(world, saving, lambda: make(*loaded, 3, use_orig_params=not use_orig_params))
    for number in (None, 2):
        for training in (saving, loading):
            if training and number:
                training.step(number)
        found = gather_tensors(world, saving, loading)
        for rank in range(loaded[1]):
            assert_named_close(found[rank][1], found[0][0], EXACT)


@pytest.mark.ranks(2, 4)
def test_rank0_only_optim_state_works_for_hybrid_models(world, engine):
    saving = hybrid(engine, world, 2)
    state = saving.state(FULL, *RANK0_ONLY)
    assert [bool(part) for part in state.values()] == [world.rank == 0] * 2
    expected = saving.state()["optimizer"]["state"]
    loading = hybrid(engine, world, 3)
    loading.load_optimizer(state, FULL, *RANK0_ONLY)
    for name, moments in loading.state()["optimizer"]["state"].items():
        assert_named_close(moments, expected[name], EXACT)


@pytest.mark.ranks(4)
def test_loading_state_of_one_rank_alone_is_refused_in_hybrid(world, engine):
    model = hybrid(engine, world, 0).model
    with front.state_dict_type(model, FULL, RANK0_ONLY[0]):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="with rank0_only some ranks were given nothing to load"):
            model.load_state_dict(state, strict=False)
