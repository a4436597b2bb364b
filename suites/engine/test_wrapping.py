"""Wrap policies, and modules marked with `wrap`."""

import functools
import threading

import pytest
import torch
from torch import nn

from lockstep.conformance.models import NestedWrappedModule
from lockstep.engine import (
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    enable_wrap,
    groups,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

pytestmark = pytest.mark.ranks(2)

FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
F16, F32 = torch.float16, torch.float32


def units(model):
    return [group.name for group in groups(model)]


def wrapped(bare, policy, **arguments):
    return FullyShardedDataParallel(bare, auto_wrap_policy=policy, **arguments)


# policies


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (always_wrap_policy, ["module.0", "module.1.0", "module.1.1", "module.2", "module.3"]),
        (ModuleWrapPolicy({nn.Sequential}), ["module", "module.1"]),
        (
            CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.out_features == 16),
            ["", "module.1.0", "module.1.1"],
        ),
        (
            lambda **at: size_based_auto_wrap_policy(min_num_params=100, **at),
            ["module", "module.1.1"],
        ),
        (
            functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "in_features", 0) == 4),
            ["", "module.1.0", "module.3"],
        ),
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
            ["module", "module.1"],
        ),
    ],
    ids=["always", "module_class", "custom", "size", "lambda", "transformer"],
)
def test_policies_choose_units(world, policy, names):
    assert units(wrapped(NestedWrappedModule().to(world.device), policy)) == names


def test_custom_policy_can_override_arguments_of_a_unit(world):
    policy = CustomPolicy(lambda m: {"sharding_strategy": NONE} if isinstance(m, nn.Linear) else False)
    model = wrapped(NestedWrappedModule().to(world.device), policy, sharding_strategy=FULL)
    assert {group.sharding_strategy for group in groups(model)} == {NONE}


def test_policy_units_inherit_or_override_full_precision_in_eval(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)).to(world.device)
    own = {bare[1]: {"full_precision_in_eval": False}}
    model = wrapped(
        bare,
        CustomPolicy(lambda module: own.get(module, isinstance(module, nn.Linear))),
        mixed_precision=MixedPrecision(F16),
        full_precision_in_eval=True,
    )
    assert [group.compute_dtype for group in groups(model)] == [F16, F16, F16]
    assert [group.compute_dtype for group in groups(model.eval())] == [F32, F16, F32]


@pytest.mark.parametrize(("value", "dtype"), [("1", F32), ("0", F16), ("", F16), (None, F16)])
def test_the_environment_variable_is_read_when_a_unit_is_made(world, monkeypatch, value, dtype):
    def set_environment(value):
        if value is None:
            monkeypatch.delenv("FSDP_USE_FULL_PREC_IN_EVAL", raising=False)
        else:
            monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)

    set_environment(value)
    bare = nn.Linear(8, 8).to(world.device)
    model = FullyShardedDataParallel(bare, mixed_precision=MixedPrecision(F16))
    set_environment(None if value == "1" else "1")
    assert model.eval()(torch.ones(1, 8, device=world.device)).dtype == dtype


def test_batch_norm_becomes_a_full_precision_unit(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(world.device)
    precision = MixedPrecision(param_dtype=F16, buffer_dtype=F16)
    with pytest.warns(UserWarning, match="BatchNorm1d modules are wrapped as units of their own"):
        model = FullyShardedDataParallel(
            bare, auto_wrap_policy=CustomPolicy(lambda _: False), mixed_precision=precision
        )
    output = model(torch.randn(4, 8, device=world.device))
    output.sum().backward()
    assert output.dtype == F16
    assert {group.name: group.compute_dtype for group in groups(model)} == {"": F16, "1": F32}
    assert bare[1].running_mean.dtype == F32


def test_a_size_policy_skips_ignored_and_wrapped_parameters(world):
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(2, 2))
    bare = nn.Sequential(nn.Sequential(inner, nn.Linear(8, 8))).to(world.device)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=72)
    model = wrapped(bare, policy, ignored_states=[inner[0], *inner[1].parameters()])
    assert units(model) == ["", "0.1"]


class Attention(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["", "1"]),
        ({"force_leaf_modules": ()}, ["", "0", "0.out_proj", "1"]),
        ({"force_leaf_modules": (nn.Sequential,)}, [""]),
        ({"force_leaf_modules": (), "exclude_wrap_modules": (Attention,)}, ["", "0.out_proj", "1"]),
    ],
)
def test_a_size_policy_respects_leaf_and_excluded_classes(world, arguments, names):
    bare = nn.Sequential(Attention(8, 2), nn.Linear(8, 8), nn.Linear(2, 2)).to(world.device)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=64, **arguments)
    assert units(wrapped(bare, policy)) == names


def test_a_policy_leaves_units_wrapped_by_hand_alone(world):
    inner = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), sharding_strategy=NONE)
    bare = nn.Sequential(nn.Bilinear(8, 8, 8).to(world.device), inner)
    model = wrapped(bare, ModuleWrapPolicy({nn.Bilinear}))
    assert {g.name: g.sharding_strategy for g in groups(model)} == {"0": FULL, "1": NONE}
    assert model[1] is inner


def test_a_batch_norm_in_a_unit_wrapped_by_hand_stays_in_it(world):
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare = nn.Sequential(nn.Linear(8, 8).to(world.device), FullyShardedDataParallel(inner))
    model = wrapped(bare, CustomPolicy(lambda _: False), mixed_precision=MixedPrecision(param_dtype=F16))
    assert {g.name: g.compute_dtype for g in groups(model)} == {"": F16, "1": F32}


def test_a_shared_module_becomes_one_unit_in_all_its_places(world):
    shared = nn.Linear(8, 8)
    bare = nn.Sequential(shared, nn.Sequential(shared)).to(world.device)
    model = wrapped(bare, ModuleWrapPolicy({nn.Linear}))
    assert bare[0] is bare[1][0] is not shared
    assert units(model) == ["0"]


def test_the_full_precision_warning_points_at_the_caller(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    with pytest.warns(UserWarning, match="BatchNorm1d") as caught:
        FullyShardedDataParallel(
            bare, auto_wrap_policy=always_wrap_policy, mixed_precision=MixedPrecision(param_dtype=F16)
        )
    assert [warning.filename for warning in caught] == [__file__]


def test_ignored_module_classes_stay_precise_under_any_policy(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    low = MixedPrecision(param_dtype=F16)
    policy = CustomPolicy(lambda m: {"mixed_precision": low})
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = wrapped(bare, policy, mixed_precision=low)
    assert {g.name: g.compute_dtype for g in groups(model)} == {"0": F16, "1": F32}


# marks


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.unit = wrap(nn.Linear(8, 8))
        self.kept = wrap(nn.Linear(8, 8), sharding_strategy=GRAD_OP)


def test_wrap_merges_its_arguments_into_those_of_the_context():
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, sharding_strategy=NONE, use_orig_params=True):
        model = Marked()
    assert {g.name: g.sharding_strategy for g in groups(model)} == {"unit": NONE, "kept": GRAD_OP}
    assert list(model.unit.state_dict()) == [name for name, _ in model.unit.named_parameters()]


def test_wrap_outside_of_a_context_returns_the_module():
    module = nn.Linear(8, 8)
    with enable_wrap(wrapper_cls=nn.Sequential):
        pass
    assert wrap(module, sharding_strategy=GRAD_OP) is module


def test_an_exception_resets_the_enable_wrap_context():
    module = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="planted"), enable_wrap(wrapper_cls=nn.Sequential):
        raise ValueError("planted")
    assert wrap(module) is module


def test_the_innermost_enable_wrap_applies():
    with enable_wrap(wrapper_cls=nn.Sequential):
        with enable_wrap(wrapper_cls=lambda module, width: (module, width), width=3):
            inner = wrap(nn.Linear(8, 8))
        outer = wrap(nn.Linear(8, 8))
    assert (type(inner), inner[1], type(outer)) == (tuple, 3, nn.Sequential)


def test_enable_wrap_applies_to_its_own_thread():
    module, found = nn.Linear(8, 8), []
    with enable_wrap(wrapper_cls=nn.Sequential):
        thread = threading.Thread(target=lambda: found.append(wrap(module)))
        thread.start()
        thread.join()
    assert found == [module]


def test_a_wrapper_that_cannot_be_called_is_refused():
    with (
        pytest.raises(TypeError, match="wrapper_cls must be a class that takes a module"),
        enable_wrap(wrapper_cls=nn.Linear(8, 8).weight),
    ):
        pass
