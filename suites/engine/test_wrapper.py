"""What the user of the wrapper front sees: names, states, dtypes, full parameters, errors with a cure."""

import gc
import weakref

import pytest
import torch
from torch import nn

from harness.assertions import assert_named_close
from harness.conformance.models import NestedWrappedModule
from harness.engine import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    groups,
)

pytestmark = pytest.mark.ranks(2)

FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
F16, F32 = torch.float16, torch.float32
summon = FullyShardedDataParallel.summon_full_params


def nested(world, **arguments):
    torch.manual_seed(0)
    return FullyShardedDataParallel(NestedWrappedModule().to(world.device), **arguments)


def batch(world):
    return torch.ones(4, 8, device=world.device)


def states(model):
    return [group.state.name for group in groups(model)]


# names, sizes, states


def test_original_parameters_keep_identity_and_show_the_shard(world):
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(world.device)
    before = dict(bare.named_parameters())
    model = FullyShardedDataParallel(
        bare, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True
    )
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sizes == {
        "0.weight": ((3,), (1,))[world.rank],
        "0.bias": ((0,), (2,))[world.rank],
        "1.weight": ((2,), (0,))[world.rank],
        "1.bias": ((0,), (1,))[world.rank],
    }


def test_without_use_orig_params_each_group_has_a_flat_parameter(world):
    model = nested(world, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes == {
        "module.0.flat_param": 18,
        "module.1.0.flat_param": 40,
        "module.1.1.flat_param": 136,
        "module.2.flat_param": 34,
        "module.3.flat_param": 20,
    }


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrapping_frees_the_unsharded_parameters(world, use_orig_params):
    bare = nn.Linear(8, 7).to(world.device)
    originals = list(bare.parameters())
    model = FullyShardedDataParallel(bare, use_orig_params=use_orig_params)
    (group,) = groups(model)
    for parameter in [*originals, *model.parameters()]:
        assert parameter.untyped_storage().nbytes() == group.local_bytes == 4 * 32


@pytest.mark.ranks(3)
def test_group_info_has_names_and_sizes(world):
    (group,) = groups(FullyShardedDataParallel(nn.Linear(3, 1).to(world.device)))
    assert (group.name, group.parameters) == ("", ("weight", "bias"))
    assert (group.local_numel, group.full_numel, group.padding) == (2, 6, 2)
    assert (group.local_bytes, group.gathered_bytes, group.gradient_dtype) == (8, 0, None)


@pytest.mark.parametrize(
    ("strategy", "after"), [(FULL, "SHARDED"), (GRAD_OP, "RETAINED"), (NONE, "RETAINED")]
)
def test_the_strategy_decides_whether_groups_stay_until_backward(world, strategy, after):
    model = nested(world, sharding_strategy=strategy, use_orig_params=True)
    seen = []
    model.module.module[1].register_forward_hook(lambda *_: seen.extend(states(model)))
    shapes = [p.shape for p in model.parameters()]
    loss = model(batch(world)).sum()
    assert (seen, states(model)) == (["UNSHARDED"], [after])
    assert [p.shape for p in model.parameters()] == shapes
    loss.backward()
    assert states(model) == ["SHARDED"]


def test_modules_compute_with_plain_tensors_autograd_tracks(world):
    model = nested(world, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, *_: seen.append((type(m.weight), m.weight.requires_grad)))
    model(batch(world))
    assert seen == [(torch.Tensor, True)] * 5


# dtypes


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_cast_after_wrapping_casts_gradients_and_buffers(world, use_orig_params):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    model = FullyShardedDataParallel(bare, use_orig_params=use_orig_params)
    model(batch(world)).sum().backward()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}
    model(batch(world).double()).sum().backward()
    assert {b.dtype for b in model.buffers()} == {torch.float64, torch.int64}


# full parameters and state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned_parameters_are_originals_and_changes_are_kept(world, use_orig_params):
    bare = NestedWrappedModule().to(world.device)
    expected = {name: p.detach().clone() for name, p in bare.named_parameters()}
    world.assert_same({name: p.sum().item() for name, p in expected.items()})
    model = FullyShardedDataParallel(
        bare, auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params
    )
    with summon(model):
        assert_named_close(dict(model.named_parameters()), expected)
        for parameter in model.parameters():
            parameter.data.add_(1)
    with summon(model, writeback=False):
        assert_named_close(dict(model.named_parameters()), {n: p + 1 for n, p in expected.items()})


def test_summoned_changes_are_dropped_without_writeback(world):
    model = nested(world)
    with summon(model, writeback=False):
        model.module.module[0].weight.data.zero_()
    with summon(model):
        assert model.module.module[0].weight.any()


def test_rank0_only_summons_on_rank_zero(world):
    model = nested(world, use_orig_params=True)
    with summon(model, writeback=False, rank0_only=True):
        assert states(model) == [("SUMMONED", "SHARDED")[world.rank]]


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_parameter_overwritten_in_place_changes_the_output(world, strategy):
    bare = nn.Linear(8, 8, bias=False).to(world.device)
    model = FullyShardedDataParallel(bare, sharding_strategy=strategy, use_orig_params=True)
    with torch.no_grad():
        model.weight.fill_(2)
    assert model(batch(world)).unique().tolist() == [16]
    model.weight.data = torch.full((8, 8), 3.0, device=world.device)
    assert model(batch(world)).unique().tolist() == [24]


def test_saved_state_carries_the_versions_of_modules(world):
    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.loaded = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    inner = Versioned(2, 2).to(world.device)
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(inner)))
    model.load_state_dict(model.state_dict())
    assert inner.loaded == 3


def test_loading_reports_missing_and_unexpected_names(world):
    model = nested(world, auto_wrap_policy=always_wrap_policy)
    state = model.state_dict()
    state["module.9.weight"] = state.pop("module.0.weight")
    with pytest.raises(
        RuntimeError, match=r"Missing key.*\"module\.0\.weight\"[^U]*Unexpected key.*\"module\.9\.weight\""
    ):
        model.load_state_dict(state)
    assert set(states(model)) == {"SHARDED"}


# errors


def test_reading_an_unknown_attribute_names_the_wrapped_class(world):
    with pytest.raises(AttributeError, match="'NestedWrappedModule' object has no attribute 'nothing'"):
        nested(world).nothing  # noqa: B018


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_dropped_model_frees_its_memory(world, strategy):
    model = nested(
        world, sharding_strategy=strategy, auto_wrap_policy=always_wrap_policy, use_orig_params=True
    )
    model(batch(world)).sum().backward()
    model(batch(world))
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 10
