"""State dicts of tensor parallel models: placements, full values, and checkpoints that change their mesh."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import TensorParallelModel

pytestmark = pytest.mark.ranks(4)

FULL = StateDictOptions(full_state_dict=True)
PLANS = pytest.mark.parametrize("plan", TensorParallelModel.plans)


def bare(world, seed=0, **sizes):
    torch.manual_seed(world.seed + seed)
    return TensorParallelModel(**sizes).to(world.device)


def sharded(world, front, axes, plan, seed=0):
    model = bare(world, seed)
    if axes.tensor.size() > 1:
        model.parallelize(axes.tensor, plan)
    return front.shard(model, mesh=axes.data)


def step(world, axes, model, optimizer, seed):
    batch = model.batch(torch.Generator().manual_seed(seed)).to(world.device)
    model(axes.own(batch)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model):
    return torch.optim.Adam(model.parameters(), 0.1)


SHARDED = {
    # What the tensor axis has divided along the same dim, the shard axis divides again.
    "blocks.0.up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
    "blocks.0.up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
    "blocks.0.down.weight": (Shard(0), Shard(1)),
    "blocks.0.down.bias": (Shard(0), Replicate()),
}
IN_SEQUENCE = {
    "embedding.weight": (_StridedShard(0, split_factor=2), Shard(0)),
    "blocks.0.norm.weight": (Shard(0), Replicate()),
    "head.weight": (_StridedShard(0, split_factor=2), Shard(0)),
}


@PLANS
def test_state_dicts_hold_dtensors_over_both_axes(world, grid, fully_shard, plan):
    axes, full = grid(2, 2), bare(world).state_dict()
    state = sharded(world, fully_shard, axes, plan).state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in full.items()}
    expected = SHARDED | (IN_SEQUENCE if plan == "sequence" else {})
    assert {name: state[name].placements for name in expected} == expected
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        divided = plan == "sequence" or ".up." in name or ".down." in name
        assert tensor.device_mesh == (axes.mesh if divided else axes.data)
    assert_named_close({name: tensor.full_tensor() for name, tensor in state.items()}, full, EXACT)


def test_hybrid_state_dicts_hold_dtensors_over_three_axes(world, grid, fully_shard):
    axes = grid(2, 1, 2)
    state = sharded(world, fully_shard, axes, "sequence").state_dict()
    assert {tensor.device_mesh for tensor in state.values()} == {axes.mesh}
    expected = {name: (Replicate(), *placements) for name, placements in (SHARDED | IN_SEQUENCE).items()}
    assert {name: state[name].placements for name in expected} == expected
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    assert_named_close(full, bare(world).state_dict(), EXACT)


def test_replicas_hold_dtensors_over_both_axes(world, grid, replicate):
    axes = grid(2, 2)
    state = sharded(world, replicate, axes, "sequence").state_dict()
    assert state["blocks.0.up.weight"].placements == (Replicate(), Shard(0))
    assert state["blocks.0.down.bias"].placements == (Replicate(), Replicate())
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    assert_named_close(full, bare(world).state_dict(), EXACT)


@PLANS
def test_a_full_state_dict_is_plain(world, grid, fully_shard, plan):
    state = get_model_state_dict(sharded(world, fully_shard, grid(2, 2), plan), options=FULL)
    assert not any(isinstance(tensor, DTensor) for tensor in state.values())
    assert_named_close(state, bare(world).state_dict(), EXACT)


@PLANS
def test_a_full_state_dict_loads(world, grid, fully_shard, plan):
    """Where the axes divide a dim evenly: of an uneven strided shard torch 2.13 scatters no full tensor."""
    axes = grid(2, 2)
    model = fully_shard.shard(bare(world, hidden=8).parallelize(axes.tensor, plan), mesh=axes.data)
    full = bare(world, seed=1, hidden=8).state_dict()
    set_model_state_dict(model, dict(full), options=FULL)  # it changes the dict
    assert_named_close(fully_shard.full_parameters(model), full, EXACT)


CHANGES = {
    "2x2-to-2x2": ((2, 2), (2, 2)),
    "2x2-to-4x1": ((2, 2), (4, 1)),
    "4x1-to-2x2": ((4, 1), (2, 2)),
    "2x2-to-1x2x2": ((2, 2), (1, 2, 2)),
    "2x1x2-to-2x2": ((2, 1, 2), (2, 2)),
}
ALL_CHANGES = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@ALL_CHANGES
@PLANS
def test_a_checkpoint_loads_on_another_mesh(world, grid, fully_shard, plan, change):
    """Weights and moments; training goes on as it would have without."""
    before, after = grid(*change[0]), grid(*change[1])
    saved = sharded(world, fully_shard, before, plan)
    optimizer = adam(saved)
    step(world, before, saved, optimizer, seed=0)
    place = world.shared_tmp_path / "saved"
    weights, moments = get_state_dict(saved, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place)

    loaded = sharded(world, fully_shard, after, plan, seed=1)
    other = adam(loaded)
    weights, moments = get_state_dict(loaded, other)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=place)
    set_state_dict(loaded, other, model_state_dict=weights, optim_state_dict=moments)
    assert_named_close(fully_shard.full_parameters(loaded), fully_shard.full_parameters(saved), EXACT)
    step(world, before, saved, optimizer, seed=1)
    step(world, after, loaded, other, seed=1)
    assert_named_close(fully_shard.full_parameters(loaded), fully_shard.full_parameters(saved))


def test_a_checkpoint_of_the_unsharded_model_loads(world, grid, fully_shard):
    place = world.shared_tmp_path / "saved"
    dcp.save(bare(world).state_dict(), checkpoint_id=place)
    model = sharded(world, fully_shard, grid(2, 2), "sequence", seed=1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=place)
    model.load_state_dict(state)
    assert_named_close(fully_shard.full_parameters(model), bare(world).state_dict(), EXACT)


def test_states_may_be_assigned(world, grid, fully_shard):
    model = sharded(world, fully_shard, grid(2, 2), "sequence")
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert {p.min().full_tensor().item() for p in model.parameters()} == {1.0}
