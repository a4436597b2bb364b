"""Training goes on from a checkpoint at another world size, with other units: files and plain dicts."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from harness.assertions import assert_named_close
from harness.assertions.closeness import EXACT
from harness.conformance import ShardSpec
from harness.conformance.models import UnevenShapes
from harness.engine import FullyShardedDataParallel, StateDictType

pytestmark = pytest.mark.ranks(3)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


@pytest.fixture
def groups(world):
    """The first rank, the first two, and all three, as process groups by their sizes."""
    made = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    yield made
    world.barrier()
    for size, group in made.items():
        if world.rank < size:
            dist.destroy_process_group(group)


class Training:
    """A model and its optimizer, some steps on; every rank trains on the same batches."""

    def __init__(self, engine, group, steps, units=UnevenShapes.units, **spec):
        torch.manual_seed(steps)
        self.model = engine.shard(UnevenShapes(), ShardSpec(units=units, process_group=group, **spec))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for number in range(steps):
            self.step(number)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        self.optimizer.zero_grad()
        UnevenShapes.loss(self.model(UnevenShapes.batch(generator))).backward()
        self.optimizer.step()

    def state(self, kind=FULL):
        front = FullyShardedDataParallel
        with front.state_dict_type(self.model, kind):
            optimizer = front.optim_state_dict(self.model, self.optimizer)
            return {"model": self.model.state_dict(), "optimizer": optimizer}

    def load(self, state, kind=FULL):
        front = FullyShardedDataParallel
        with front.state_dict_type(self.model, kind):
            self.model.load_state_dict(state["model"])
            front.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"], load_directly=True)

    def tensors(self):
        state = self.state()
        moments = state["optimizer"]["state"].items()
        return state["model"] | {f"{name} {key}": v for name, one in moments for key, v in one.items()}


def through_files(world, groups, size, path, saving, make):
    """Save from ranks 0 and 1, load on the first ``size`` ranks, by torch's checkpoint with sharded state."""
    if saving:
        dcp.save(saving.state(SHARDED), checkpoint_id=path, process_group=groups[2])
    world.barrier()
    if world.rank >= size:
        return None
    loading = make()
    state = loading.state(SHARDED)
    dcp.load(state, checkpoint_id=path, process_group=groups[size])
    loading.load(state, SHARDED)
    return loading


def through_dict(world, groups, size, path, saving, make):
    """Hand the full state of rank 0 over."""
    state = world.gather(saving and saving.state())[0]
    if world.rank >= size:
        return None
    loading = make()
    loading.load(state)
    return loading


OTHER = {"units": ("body.linear",), "strategy": "SHARD_GRAD_OP"}


@pytest.mark.parametrize("carry", [through_files, through_dict])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_saved_on_two_ranks_resumes_on_one_two_and_three_with_other_units(
    world, engine, groups, size, use_orig_params, carry
):
    saving = None
    if world.rank < 2:
        saving = Training(engine, groups[2], steps=2, use_orig_params=use_orig_params)

    def make():
        return Training(engine, groups[size], 3, use_orig_params=not use_orig_params, **OTHER)

    loading = carry(world, groups, size, world.shared_tmp_path / "checkpoint", saving, make)
    before = world.gather([training and training.tensors() for training in (saving, loading)])
    assert_named_close(before[size - 1][1], before[0][0], EXACT)
    for training in (saving, loading):
        if training:
            training.step(2)
    after = world.gather([training and training.tensors() for training in (saving, loading)])
    # The mean of one or two equal gradients is exact; a third of a sum of three is not.
    assert_named_close(after[size - 1][1], after[0][0], torch.float32 if size == 3 else EXACT)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_training_saved_on_one_rank_resumes_on_three(world, engine, groups, strategy):
    saving = Training(engine, groups[1], 2, use_orig_params=True) if world.rank == 0 else None
    state = world.gather(saving and saving.state())[0]
    loading = Training(engine, groups[3], 3, strategy=strategy, offload=True)
    loading.load(state)
    expected = world.gather(saving and saving.tensors())[0]
    assert_named_close(loading.tensors(), expected, EXACT)


def test_local_state_of_another_world_size_is_refused(world, engine, groups):
    saving = Training(engine, groups[2], 1) if world.rank < 2 else None
    state = world.gather(saving and saving.state(LOCAL))[min(world.rank, 1)]
    loading = Training(engine, groups[3], 2)
    refused = "loads on the same rank, world size and wrapping only"
    with FullyShardedDataParallel.state_dict_type(loading.model, LOCAL):
        with pytest.raises(RuntimeError, match=refused):
            loading.model.load_state_dict(state["model"])
        with pytest.raises(ValueError, match=refused):
            FullyShardedDataParallel.optim_state_dict_to_load(
                loading.model, loading.optimizer, state["optimizer"]
            )


def test_a_dtensor_of_other_ranks_is_refused_where_it_cannot_be_read(world, engine, groups):
    model = Training(engine, groups[3], 0).model
    mesh = DeviceMesh("cpu", [0, 1])
    bias = DTensor.from_local(torch.ones(5), mesh, [Replicate()], run_check=False)
    refused = pytest.raises(ValueError, match=r"'first.bias' is a DTensor over .* not among its ranks")
    with refused if world.rank == 2 else nullcontext():
        model.load_state_dict(model.state_dict() | {"first.bias": bias})
