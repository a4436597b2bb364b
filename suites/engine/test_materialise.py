"""Models on the meta device: every unit is materialised right before it is sharded."""

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close, assert_same_across_ranks
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import NestedWrappedModule
from lockstep.engine import (
    CPUOffload,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    always_wrap_policy,
    groups,
)

pytestmark = pytest.mark.ranks(2)

summon = FullyShardedDataParallel.summon_full_params


class Norms(nn.Module):
    """Linear layers, a batch norm with buffers, a recurrent layer; no parent has parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)])
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.recurrent(x)[0]


class Own(nn.Module):
    """A parameter next to a child, created after the child as in the constructor."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.own = nn.Parameter(torch.empty(8))
        self.register_buffer("seen", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.own)
        self.seen.fill_(3)

    def forward(self, x):
        return self.child(x) * self.own


def on_meta(make):
    with torch.device("meta"):
        return make()


def seeded(make, world):
    torch.manual_seed(1)
    return make().to(world.device).state_dict()


def sharded(bare, world, **arguments):
    torch.manual_seed(1)
    return FullyShardedDataParallel(bare, device_id=world.device, **arguments)


def empty(module):
    module.to_empty(device="cpu", recurse=False)


# values


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("policy", [None, always_wrap_policy], ids=["one", "always"])
@pytest.mark.parametrize("make", [Norms, Own, NestedWrappedModule])
def test_a_model_on_meta_gets_the_values_of_one_made_on_cpu(world, make, policy, use_orig_params):
    expected = seeded(make, world)
    model = sharded(on_meta(make), world, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert list(model.state_dict()) == list(expected)
    assert_named_close(model.state_dict(), expected, EXACT)


def test_offloaded_parameters_are_materialised_on_cpu(world):
    expected = seeded(Norms, world)
    model = sharded(on_meta(Norms), world, cpu_offload=CPUOffload(True), auto_wrap_policy=always_wrap_policy)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert_named_close(model.state_dict(), expected, EXACT)


def test_param_init_fn_is_called_once_per_module_on_meta(world):
    bare = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.BatchNorm1d(8, affine=False))
    real = nn.Linear(8, 8)
    seen = []

    def init(module):
        seen.append(type(module))
        module.to_empty(device=world.device, recurse=False)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(2)

    bare = nn.Sequential(bare.to("meta"), real)
    model = FullyShardedDataParallel(bare, device_id=world.device, param_init_fn=init)
    assert seen == [nn.Linear, nn.BatchNorm1d]
    assert model.state_dict()["0.0.0.weight"].unique().tolist() == [2]
    assert model.state_dict()["0.1.running_var"].unique().tolist() == [2]


def test_initialised_parameters_keep_their_values(world):
    bare = nn.Linear(8, 8, device=world.device)
    expected = bare.weight.detach().clone()
    bare.bias = nn.Parameter(torch.empty(8, device="meta"))
    model = FullyShardedDataParallel(bare, use_orig_params=True)
    assert torch.equal(model.state_dict()["weight"], expected)
    assert model.state_dict()["bias"].any()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_sync_module_states_fills_meta_modules_from_rank_zero(world, use_orig_params):
    bare = Norms().to(world.device) if world.rank == 0 else on_meta(Norms)
    bare.requires_grad_(use_orig_params)
    model = FullyShardedDataParallel(
        bare,
        device_id=world.device,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        param_init_fn=empty,
        sync_module_states=True,
    )
    assert_same_across_ranks(model.state_dict())
    assert {p.requires_grad for p in model.parameters()} == {use_orig_params}
    assert model.state_dict()["layers.1.running_var"].unique().tolist() == [1]


def test_parameter_order_is_the_same_with_parts_on_meta(world):
    bare = nn.Linear(8, 8, device=world.device)
    if world.rank == 1:
        bare.bias = nn.Parameter(torch.empty(8, device="meta"))
    (group,) = groups(FullyShardedDataParallel(bare, use_orig_params=True))
    assert group.parameters == ("weight", "bias")


def test_tied_parameters_stay_tied_with_the_first_ones_values(world):
    def make():
        bare = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        bare[1].weight = bare[0].weight
        return bare

    expected = seeded(make, world)
    model = sharded(on_meta(make), world, use_orig_params=True)
    assert model[0].weight is model[1].weight
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert_named_close(model.state_dict(), expected, EXACT)


def test_a_model_on_meta_trains_like_one_made_on_cpu(world):
    torch.manual_seed(1)
    outputs = []
    for bare in (Norms().to(world.device), on_meta(Norms)):
        model = sharded(bare, world, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.arange(32.0, device=world.device).view(4, 8) * (world.rank + 1)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(model.state_dict())
    assert_named_close(outputs[1], outputs[0], EXACT)


# how much there is at once


def test_units_are_materialised_one_at_a_time(world):
    bare = on_meta(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))))
    alive = []

    def init(module):
        empty(module)
        alive.append(sum(p.numel() for p in bare.parameters() if not p.is_meta))

    FullyShardedDataParallel(
        bare, auto_wrap_policy=always_wrap_policy, param_init_fn=init, use_orig_params=True
    )
    assert alive == [256, 128 + 256, 2 * 128 + 256, 3 * 128 + 256]


# what is left alone


def test_ignored_modules_and_parameters_stay_on_meta(world):
    bare = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    left = [*bare[1].parameters(), bare[0].bias]
    model = FullyShardedDataParallel(bare, ignored_states=[bare[1], bare[0].bias], use_orig_params=True)
    assert [p.is_meta for p in left] == [True] * 3
    assert {name for name, p in model.named_parameters() if p.is_meta} == {"0.bias", "1.weight", "1.bias"}
    assert [group.parameters for group in groups(model)] == [("0.weight",)]


def test_an_ignored_parameter_next_to_a_meta_one_is_unchanged(world):
    bare = nn.Linear(8, 8, device=world.device)
    bare.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    with torch.no_grad():
        bare.bias.fill_(7)
    kept = bare.bias
    FullyShardedDataParallel(bare, ignored_states=[kept], use_orig_params=True)
    assert bare.bias is kept
    assert kept.unique().tolist() == [7]


# errors


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))

    def forward(self, x):
        return x * self.scale


def recursing(module):
    module.to_empty(device="cpu")


def tied_over_units():
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bare[1].weight = bare[0].weight
    return bare


REFUSED = {
    "no_reset": (
        lambda: nn.Sequential(Bare()),
        {},
        r"Sequential\): module '0' \(Bare\) has 'scale' on the meta device and no reset_parameters; "
        "give the class one .* or pass param_init_fn",
    ),
    "left_on_meta": (
        lambda: nn.Linear(2, 2),
        {"param_init_fn": lambda _: None},
        r"param_init_fn left 'weight' of Linear on the meta device",
    ),
    "recursing": (
        Own,
        {"param_init_fn": recursing},
        r"called with Own, replaced 'child.weight' below it.*recurse=False",
    ),
    "recursing_into_a_unit": (
        Own,
        {"param_init_fn": recursing, "auto_wrap_policy": always_wrap_policy},
        r"called with Own, replaced 'child.flat_param' below it",
    ),
    "recursing_into_a_unit_with_originals": (
        Own,
        {"param_init_fn": recursing, "auto_wrap_policy": always_wrap_policy, "use_orig_params": True},
        r"called with Own, replaced 'child.weight' below it",
    ),
    "tied_over_units": (
        tied_over_units,
        {"auto_wrap_policy": always_wrap_policy},
        r"parameter 'weight' is tied to weight of .*Linear.*which shards it already",
    ),
    "not_a_function": (lambda: nn.Linear(2, 2), {"param_init_fn": 3}, "expected a function .* got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_materialised_is_refused_by_name(case):
    make, arguments, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        FullyShardedDataParallel(on_meta(make), **arguments)


def test_a_refused_model_can_be_wrapped_after_the_remedy(world):
    bare = on_meta(Bare)
    with pytest.raises(ValueError, match="or pass param_init_fn"):
        FullyShardedDataParallel(bare)
    model = FullyShardedDataParallel(bare, param_init_fn=lambda m: empty(m) or m.scale.fill_(5))
    with summon(model):
        assert model.scale.tolist() == [5, 5]
