"""The choice of modules that become units of the wrapper: by policies, by hand, and what is ignored."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, offers

pytestmark = pytest.mark.ranks(2)


class Tree(nn.Module):
    """Layers, one of them at two places, in containers and beside attention."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.body = nn.ModuleList([nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))])
        self.attention = nn.MultiheadAttention(8, 2)
        self.again = self.first

    def forward(self, x):
        x = self.body[1](self.body[0](self.first(x).relu()))
        return self.again(self.attention(x, x, x, need_weights=False)[0])


def units(wrapper_front, model):
    """Return the classes of the modules in units below the root, in order."""
    found = wrapper_front.FullyShardedDataParallel.fsdp_modules(model)
    return sorted(type(unit.module).__name__ for unit in found[1:])


def outputs(engine, world, model, reference):
    """Return what both compute of the same, and check that gradients are those of the reference."""
    x = torch.arange(16.0, device=world.device).view(2, 8) / 16
    found, computed = model(x), reference(x)
    engine.backward(model, found.square().sum())
    computed.square().sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert_named_close(engine.full_gradients(model), gradients)
    return found, computed


POLICIES = {
    "classes": lambda f: f.ModuleWrapPolicy({nn.Sequential, nn.MultiheadAttention}),
    "function": lambda f: partial(
        f.lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "out_features", 0) == 8
    ),
    "layers": lambda f: partial(f.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
    "size": lambda f: partial(f.size_based_auto_wrap_policy, min_num_params=50),
    "forced": lambda f: partial(
        f.size_based_auto_wrap_policy,
        min_num_params=40,
        force_leaf_modules={nn.Sequential},
        exclude_wrap_modules={nn.MultiheadAttention, nn.ModuleList},
    ),
    "settings": lambda f: f.CustomPolicy(
        lambda m: (
            {"sharding_strategy": f.ShardingStrategy.SHARD_GRAD_OP}
            if isinstance(m, nn.Sequential)
            else m is getattr(m, "nothing", None)
        )
    ),
}
OUT = "NonDynamicallyQuantizableLinear"
UNITS = {
    "classes": ["MultiheadAttention", "Sequential"],
    "function": ["Linear", "Linear", OUT],
    "layers": ["Sequential"],
    "size": ["Linear", "Sequential"],
    "forced": ["Linear", OUT],
    "settings": ["Sequential"],
}


def test_a_policy_chooses_the_units(world, engine, wrapper_front, wrap, run_subtests):
    def claim(policy):
        reference = Tree().to(world.device)
        model = wrap(copy.deepcopy(reference), auto_wrap_policy=POLICIES[policy](wrapper_front))
        assert units(wrapper_front, model) == UNITS[policy]
        if OUT not in UNITS[policy]:  # attention reads the weight of this itself
            torch.testing.assert_close(*outputs(engine, world, model, reference))

    run_subtests({"policy": list(UNITS)}, claim)


def test_each_module_that_can_be_called_may_be_a_unit(world, engine, wrapper_front, wrap):
    bare = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 8))).to(world.device)
    reference = copy.deepcopy(bare)
    model = wrap(bare, auto_wrap_policy=wrapper_front.always_wrap_policy)
    assert units(wrapper_front, model) == ["Linear", "Linear", "ReLU", "Sequential"]
    torch.testing.assert_close(*outputs(engine, world, model, reference))


def test_what_a_unit_holds_already_counts_for_no_second_one(wrapper_front, wrap):
    """Of a layer at two places: by its size the layer becomes a unit, and neither of those around it."""
    layer = nn.Linear(8, 8)
    bare = nn.Sequential(*(nn.Sequential(layer, nn.Linear(8, 8)) for _ in range(2)))
    policy = partial(wrapper_front.size_based_auto_wrap_policy, min_num_params=72)
    assert units(wrapper_front, wrap(bare, auto_wrap_policy=policy)) == ["Linear"] * 3


def test_a_function_is_asked_of_each_module_that_may_be_a_unit(wrapper_front, wrap):
    """Neither of the root, nor of what is ignored or cannot be called, nor again of what it has chosen."""
    asked = []

    def chooses(module, recurse, nonwrapped_numel):
        if not recurse:
            asked.append((type(module).__name__, nonwrapped_numel))
        return recurse or isinstance(module, nn.LayerNorm)

    norm, ignored = nn.LayerNorm(4), nn.Sequential(nn.Linear(2, 2))
    bare = nn.Sequential(nn.Sequential(norm, nn.Linear(4, 4)), ignored, nn.ModuleList([norm]))
    wrap(bare, auto_wrap_policy=chooses, ignored_modules=[ignored])
    assert asked == [("LayerNorm", 8), ("Linear", 20), ("Sequential", 20)]


def test_units_made_by_hand_stay_beside_those_of_a_policy(world, engine, wrapper_front, wrap):
    reference = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))).to(world.device)
    bare = copy.deepcopy(reference)
    by_hand = bare[0] = wrap(bare[0])
    model = wrap(bare, auto_wrap_policy=wrapper_front.ModuleWrapPolicy({nn.Sequential}))
    assert units(wrapper_front, model) == ["Linear", "Sequential"]
    assert model.module[0] is by_hand
    torch.testing.assert_close(*outputs(engine, world, model, reference))


def test_units_made_by_hand_stay_in_ignored_modules_and_count_for_none_around(wrapper_front, wrap):
    bare = nn.Sequential(
        nn.Sequential(wrap(nn.Sequential(nn.Linear(8, 8)))),
        nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 4)),
    )
    policy = partial(wrapper_front.size_based_auto_wrap_policy, min_num_params=50)
    model = wrap(bare, auto_wrap_policy=policy, ignored_modules=[bare[0]])
    assert units(wrapper_front, model) == ["Linear", "Sequential"]
    ignored = nn.Sequential(wrap(nn.Sequential(nn.Linear(8, 8))))
    policy = wrapper_front.ModuleWrapPolicy({nn.Linear})
    model = wrap(nn.Sequential(ignored, nn.Linear(8, 8)), auto_wrap_policy=policy, ignored_modules=[ignored])
    assert units(wrapper_front, model) == ["Linear", "Sequential"]


def test_units_of_a_policy_cast_only_on_request(world, wrapper_front, wrap, run_subtests):
    class Widening(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x.float())

    def claim(cast):
        half = wrapper_front.MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=cast)
        policy = wrapper_front.ModuleWrapPolicy({nn.Linear})
        model = wrap(Widening().to(world.device), auto_wrap_policy=policy, mixed_precision=half)
        x = torch.ones(2, 8, device=world.device)
        if cast:
            assert model(x).dtype == torch.float16
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(x)

    run_subtests({"cast": [False, True]}, claim)


def test_batch_norm_becomes_a_unit_where_anything_is_cast(wrapper_front, wrap, run_subtests):
    def claim(what):
        half = wrapper_front.MixedPrecision(**{what: torch.bfloat16}) if what else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = wrap(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
                auto_wrap_policy=wrapper_front.ModuleWrapPolicy({nn.Linear}),
                mixed_precision=half,
            )
        assert units(wrapper_front, model) == ["BatchNorm1d"] * bool(what) + ["Linear"]
        assert any("BatchNorm" in str(each.message) for each in caught) == bool(what)

    run_subtests({"what": ["", "param_dtype", "reduce_dtype", "buffer_dtype"]}, claim)


def test_a_warning_names_the_line_that_wraps_in_low_precision(wrapper_front, wrap):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(
            nn.Sequential(nn.BatchNorm1d(8)),
            auto_wrap_policy=wrapper_front.ModuleWrapPolicy({nn.Linear}),
            mixed_precision=wrapper_front.MixedPrecision(param_dtype=torch.bfloat16),
        )
    assert [each.filename for each in caught if "BatchNorm" in str(each.message)] == [__file__]


def test_a_policy_may_give_ranks_in_the_other_way(world, engine, wrapper_front, wrap, run_subtests):
    """A group below a mesh, or a mesh below a group."""

    def claim(below):
        mesh = world.mesh(2, names=("shard",))
        ways = {"mesh": {"device_mesh": mesh}, "group": {"process_group": mesh.get_group()}}
        around = ways["group" if below == "mesh" else "mesh"]
        policy = wrapper_front.CustomPolicy(lambda m: ways[below] if isinstance(m, nn.Linear) else False)
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), auto_wrap_policy=policy, **around)
        engine.backward(model, model(torch.ones(2, 4, device=world.device)).square().sum())
        assert engine.full_gradients(model)["0.weight"].shape == (4, 4)

    run_subtests({"below": ["mesh", "group"]}, claim)


def test_units_below_have_the_settings_of_the_one_around(world, engine, wrapper_front, wrap):
    """All but what a policy gives: one that frees after forward, below one that does not."""
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8)))
    freed = {"sharding_strategy": wrapper_front.ShardingStrategy.FULL_SHARD}
    policy = wrapper_front.CustomPolicy(
        lambda m: freed if isinstance(m, nn.Linear) else isinstance(m, nn.Sequential)
    )
    model = wrap(
        bare,
        auto_wrap_policy=policy,
        sharding_strategy=wrapper_front.ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
    )
    assert not any("flat_param" in name for name, _ in model.named_parameters())
    model(torch.ones(2, 4, device=world.device))
    if offers(engine, Capability.GROUPS):
        strategies = sorted(group.sharding_strategy.name for group in engine.groups(model))
        assert strategies == ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"]


def test_modules_are_wrapped_where_they_are_marked(world, engine, wrapper_front):
    wrapper, plain = wrapper_front.FullyShardedDataParallel, nn.Linear(8, 4)
    assert wrapper_front.wrap(plain) is plain
    with wrapper_front.enable_wrap(wrapper_cls=wrapper, device_id=world.device, use_orig_params=True):
        marked = [wrapper_front.wrap(nn.Linear(8, 8).to(world.device)) for _ in range(2)]
        flat = wrapper_front.wrap(nn.Linear(4, 8).to(world.device), use_orig_params=False)
    assert wrapper_front.wrap(plain) is plain
    assert [len(list(unit.parameters())) for unit in (*marked, flat)] == [2, 2, 1]
    model = wrapper(nn.Sequential(*marked), device_id=world.device, use_orig_params=True)
    assert units(wrapper_front, model) == ["Linear"] * 2
    engine.backward(model, model(torch.ones(2, 8, device=world.device)).sum())
    assert all(gradient.any() for gradient in engine.full_gradients(model).values())


def test_the_innermost_mark_counts_and_an_error_ends_it(world, wrapper_front):
    settings = {"wrapper_cls": wrapper_front.FullyShardedDataParallel, "device_id": world.device}
    numbers = []

    def fail():
        with wrapper_front.enable_wrap(use_orig_params=True, **settings):
            with wrapper_front.enable_wrap(**settings):
                numbers.append(len(list(wrapper_front.wrap(nn.Linear(8, 4).to(world.device)).parameters())))
            numbers.append(len(list(wrapper_front.wrap(nn.Linear(8, 4).to(world.device)).parameters())))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    plain = nn.Linear(8, 4)
    assert (numbers, wrapper_front.wrap(plain) is plain) == ([1, 2], True)


@pytest.mark.parametrize("way", ["modules", "states", "parameters"])
def test_what_is_ignored_is_neither_sharded_nor_chosen(world, wrapper_front, wrap, way):
    bare = Tree().to(world.device)
    reference = copy.deepcopy(bare)
    given = {
        "modules": {"ignored_modules": [bare.body]},
        "states": {"ignored_states": [bare.body]},
        "parameters": {"ignored_states": list(bare.body.parameters())},
    }[way]
    policy = wrapper_front.ModuleWrapPolicy({nn.Sequential, nn.MultiheadAttention})
    model = wrap(bare, auto_wrap_policy=policy, use_orig_params=True, **given)
    inner = [name for name in units(wrapper_front, model) if name == "Sequential"]
    assert inner == ([] if way != "parameters" else ["Sequential"])
    kept, expected = (
        {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach()
            for name, parameter in each.named_parameters()
            if "body" in name
        }
        for each in (model, reference)
    )
    assert_named_close(kept, expected, EXACT)
    x = torch.ones(2, 8, device=world.device)
    torch.testing.assert_close(model(x), reference(x))
