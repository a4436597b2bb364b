"""The adapter of the built-in engine, and the models of the zoo that it shards."""

import pytest
import torch
from torch import nn

from harness.adapters import Precision, ShardSpec, find
from harness.zoo import AlwaysWrapNestedWrappedModule, NestedWrappedModule, UnevenShapes


def test_an_unknown_engine_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no engine is called 'zero'; known: lockstep"):
        find("zero")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ShardSpec("HYBRID_SHARD"),
            "strategy 'HYBRID_SHARD' is not built; known: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
        (ShardSpec(units=("module.7",)), r"units \['module.7'\] are not submodules of NestedWrappedModule"),
        (ShardSpec(precision=Precision(param_dtype=torch.int8)), "param_dtype must be a floating-point"),
    ],
)
def test_a_spec_that_cannot_be_met_is_refused(world, engine, spec, message):
    with pytest.raises(ValueError, match=message):
        engine.shard(NestedWrappedModule(), spec)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (NestedWrappedModule, {"": 78, "module.1": 273, "module.1.0": 81, "module.2": 69}),
        (
            AlwaysWrapNestedWrappedModule,
            {"module.0": 36, "module.1.0": 81, "module.1.1": 273, "module.2": 69, "module.3": 42},
        ),
        (UnevenShapes, {"": 66, "body": 30, "body.gate": 3}),
    ],
)
def test_the_models_of_the_zoo_name_their_units(world, engine, model, sizes):
    sharded = engine.shard(model().to(world.device), ShardSpec(units=model.units))
    assert {group.name: group.full_numel for group in engine.groups(sharded)} == sizes


@pytest.mark.ranks(2)
def test_units_are_chosen_by_name_and_by_class(world, engine):
    bare = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Bilinear(2, 2, 2)), nn.Linear(2, 2))
    sharded = engine.shard(bare.to(world.device), ShardSpec(units=("2", nn.Bilinear)))
    assert [group.name for group in engine.groups(sharded)] == ["", "1.0", "2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_parameters_and_gradients_are_copies_under_bare_names(world, engine, use_orig_params):
    bare = nn.Linear(2, 2).to(world.device)
    expected = {name: p.detach().clone() for name, p in bare.named_parameters()}
    sharded = engine.shard(bare, ShardSpec(use_orig_params=use_orig_params, sync_module_states=True))
    assert engine.full_gradients(sharded) == {"weight": None, "bias": None}
    found = engine.full_parameters(sharded)
    if world.rank == 0:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    found["weight"].zero_()
    assert engine.full_parameters(sharded)["weight"].any()
