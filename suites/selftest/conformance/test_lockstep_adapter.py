"""The adapter of the built-in engine."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.conformance import Precision, ShardSpec, find
from lockstep.conformance.models import BatchNormNet, NestedWrappedModule


def test_an_unknown_engine_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no engine is called 'zero'; known: lockstep"):
        find("zero")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ShardSpec("ZERO_4"),
            "strategy 'ZERO_4' is not built; known: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD",
        ),
        (ShardSpec(units=("module.7",)), r"units \['module.7'\] are not submodules of NestedWrappedModule"),
        (ShardSpec(unit_groups={"module.8": None}), r"units \['module.8'\] are not submodules"),
        (ShardSpec(unit_precisions={"module.9": Precision()}), r"units \['module.9'\] are not submodules"),
        (ShardSpec(precision=Precision(param_dtype=torch.int8)), "param_dtype must be a floating-point"),
        (ShardSpec(units=("module.1",), min_num_params=1), "min_num_params chooses the units"),
    ],
)
def test_a_spec_that_cannot_be_met_is_refused(world, engine, spec, message):
    with pytest.raises(ValueError, match=message):
        engine.shard(NestedWrappedModule(), spec)


@pytest.mark.ranks(2)
def test_units_are_chosen_by_name_and_by_class(world, engine):
    bare = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Bilinear(2, 2, 2)), nn.Linear(2, 2))
    sharded = engine.shard(bare.to(world.device), ShardSpec(units=("2", nn.Bilinear)))
    assert [group.name for group in engine.groups(sharded)] == ["", "1.0", "2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("min_num_params", "units"),
    [
        (80, ["module", "module.1.0", "module.1.1"]),
        (224, ["module", "module.1.1"]),
        (225, ["", "module.1.1"]),
        (1000, [""]),
    ],
)
def test_units_are_chosen_by_size(world, engine, min_num_params, units):
    model = engine.shard(NestedWrappedModule().to(world.device), ShardSpec(min_num_params=min_num_params))
    assert [group.name for group in engine.groups(model)] == units


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("classes", "units"), [(None, [""]), ((), [""]), ((nn.LayerNorm,), ["", "ln"])])
def test_full_precision_classes_are_units_without_other_units(world, engine, classes, units):
    precision = Precision(torch.float16, full_precision_classes=classes)
    with pytest.warns(UserWarning, match="LayerNorm") if classes else nullcontext():
        model = engine.shard(BatchNormNet().to(world.device), ShardSpec(precision=precision))
    assert [group.name for group in engine.groups(model)] == units


@pytest.mark.ranks(2)
def test_a_units_own_process_group_alone_shards_it(world, engine):
    own, both = dist.new_subgroups(1)
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(world.device)
    model = engine.shard(bare, ShardSpec(unit_groups={"1": own}))
    model(torch.full((1, 2), 1.0 + world.rank, device=world.device)).sum().backward()
    assert [(g.name, g.local_numel, g.full_numel) for g in engine.groups(model)] == [("", 3, 6), ("1", 6, 6)]
    gradients = engine.full_gradients(model)
    assert world.gather(gradients["1.bias"].tolist()) == [[1.0, 1.0]] * 2
    first, second = world.gather(gradients["1.weight"].cpu())
    assert not torch.equal(first, second)
    world.assert_same(gradients["0.weight"])
    for group in both:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_unit_may_have_its_own_process_group_and_precision(world, engine):
    own, both = dist.new_subgroups(1)
    low, half = Precision(torch.bfloat16), Precision(torch.float16, torch.float32)
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(world.device)
    spec = ShardSpec(precision=low, units=("2",), unit_groups={"1": own}, unit_precisions={"1": half})
    found = [
        (g.name, g.full_numel // g.local_numel, g.compute_dtype, g.reduce_dtype)
        for g in engine.groups(engine.shard(bare, spec))
    ]
    assert found == [
        ("", 2, torch.bfloat16, torch.bfloat16),
        ("1", 1, torch.float16, torch.float32),
        ("2", 2, torch.bfloat16, torch.bfloat16),
    ]
    for group in both:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writeback", [False, True])
def test_changes_to_summoned_parameters_are_kept_with_writeback(world, engine, writeback):
    bare = nn.Linear(2, 2, bias=False).to(world.device)
    nn.init.ones_(bare.weight)
    sharded = engine.shard(bare, ShardSpec())
    with engine.summon(sharded, writeback=writeback), torch.no_grad():
        (weight,) = sharded.parameters()
        assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        weight.fill_(2.0)
    expected = 2.0 if writeback else 1.0
    assert engine.full_parameters(sharded)["weight"].tolist() == [[expected] * 2] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_parameters_and_gradients_are_copies_by_name(world, engine, use_orig_params):
    bare = nn.Linear(2, 2).to(world.device)
    expected = {name: p.detach().clone() for name, p in bare.named_parameters()}
    sharded = engine.shard(bare, ShardSpec(use_orig_params=use_orig_params, sync_module_states=True))
    assert engine.full_gradients(sharded) == {"weight": None, "bias": None}
    found = engine.full_parameters(sharded)
    if world.rank == 0:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    found["weight"].zero_()
    assert engine.full_parameters(sharded)["weight"].any()
