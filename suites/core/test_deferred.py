"""Models made on the meta device, which get their values when they are wrapped."""

import gc

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, require

pytestmark = pytest.mark.ranks(2)


class Filled(nn.Module):
    """A weight and a buffer whose values say how often they were initialised, and in what order."""

    made = 0

    def __init__(self, *children):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("offset", torch.empty(2))
        self.register_buffer("nothing", None)
        self.below = nn.ModuleList(children)

    def reset_parameters(self):
        type(self).made += 1
        nn.init.constant_(self.weight, float(self.made))
        self.offset = torch.full_like(self.offset, 10.0 * self.made)

    def forward(self, x):
        for child in self.below:
            x = child(x)
        return x * self.weight.sum() + self.offset.sum()


class Bare(nn.Module):
    """A weight that the class does not initialise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x):
        return x * self.weight.sum()


@pytest.fixture(autouse=True)
def from_the_first(monkeypatch):
    monkeypatch.setattr(Filled, "made", 0)


def on_meta(make):
    with torch.device("meta"):
        return make()


def fill(module):
    """Initialise the module's own parameters and buffers, as a `param_init_fn` does."""
    module.to_empty(device="cpu", recurse=False)
    for number, tensor in enumerate((*module.parameters(recurse=False), *module.buffers(recurse=False))):
        nn.init.constant_(tensor, 3.0 + number)


@pytest.mark.parametrize("way", ["one_unit", "units"])
def test_each_module_initialises_itself_once_children_first(
    world, engine, wrapper_front, wrap, way, use_orig_params
):
    bare = on_meta(lambda: Filled(Filled(), Filled()))
    policy = wrapper_front.ModuleWrapPolicy({Filled}) if way == "units" else None
    model = wrap(bare, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert Filled.made == 3
    found = engine.full_parameters(model)
    assert {name: values.tolist() for name, values in found.items()} == {
        "below.0.weight": [1.0] * 4,
        "below.1.weight": [2.0] * 4,
        "weight": [3.0] * 4,
    }
    state = {name: value.tolist() for name, value in engine.full_state(model).items() if "offset" in name}
    assert state == {"below.0.offset": [10.0] * 2, "below.1.offset": [20.0] * 2, "offset": [30.0] * 2}
    x = torch.full((1, 1), 1.0, device=world.device)
    assert model(x).item() == ((1 * 4 + 20) * 8 + 40) * 12 + 60
    engine.backward(model, model(x).sum())
    assert all(gradient.any() for gradient in engine.full_gradients(model).values())


def test_a_function_initialises_what_has_values_of_its_own(engine, wrap, use_orig_params):
    called = []

    def init(module):
        called.append(type(module).__name__)
        fill(module)

    bare = on_meta(lambda: nn.Sequential(nn.ReLU(), Bare(), nn.Linear(4, 2)))
    model = wrap(bare, param_init_fn=init, use_orig_params=use_orig_params)
    assert sorted(called) == ["Bare", "Linear"]
    found = {name: set(p.flatten().tolist()) for name, p in engine.full_parameters(model).items()}
    assert found == {"1.weight": {3.0}, "2.weight": {3.0}, "2.bias": {4.0}}


class Partly(nn.Module):
    """A weight on meta beside one with values, which `reset_parameters` sets both."""

    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.arange(4.0))
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def reset_parameters(self):
        self.kept = nn.Parameter(torch.zeros(4))
        nn.init.ones_(self.weight)

    def forward(self, x):
        return x * self.weight.sum() + self.kept.sum()


def test_what_has_values_keeps_them(world, engine, wrap):
    """pytorch's own engine calls `to_empty` on the whole module, and so loses them."""
    bare = Partly()
    before = bare.kept
    model = wrap(bare, use_orig_params=True, ignored_states=[bare.kept])
    assert model.module.kept is before
    assert before.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model(torch.ones(1, device=world.device)).item() == 10.0
    whole = wrap(Partly(), use_orig_params=True)
    found = engine.full_parameters(whole)
    expected = {"kept": torch.arange(4.0), "weight": torch.ones(4)}
    assert_named_close(found, expected, EXACT)


def test_what_is_ignored_may_stay_without_values(world, wrap):
    bare = on_meta(Bare)
    model = wrap(nn.Sequential(nn.Linear(4, 4), bare), ignored_modules=[bare])
    assert model.module[1].weight.is_meta


def test_a_function_leaves_what_has_values(engine, wrap):
    """Although it sets all of the module."""
    model = wrap(Partly(), use_orig_params=True, param_init_fn=fill)
    expected = {"kept": torch.arange(4.0), "weight": torch.full((4,), 4.0)}
    assert_named_close(engine.full_parameters(model), expected, EXACT)


def test_a_function_initialises_one_module_after_another(engine, wrap):
    bare = on_meta(lambda: Filled(Filled()))
    model = wrap(bare, use_orig_params=True, param_init_fn=fill)
    found = engine.full_parameters(model)
    assert {name: values.tolist() for name, values in found.items()} == {
        "below.0.weight": [3.0] * 4,
        "weight": [3.0] * 4,
    }


def test_a_function_may_give_values_to_what_is_ignored(wrap):
    bare = on_meta(lambda: Filled(Bare()))
    wrap(bare, ignored_modules=[bare.below[0]], param_init_fn=init_below)
    assert not bare.below[0].weight.is_meta


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_tied_parameters_stay_tied(engine, wrap, use_orig_params):
    model = wrap(on_meta(Tied), use_orig_params=use_orig_params)
    with engine.summon(model):
        inner = engine.unwrapped(model)
        assert inner.first.weight is inner.second.weight
        assert not inner.first.weight.is_meta
        assert list(dict(inner.named_parameters())) == ["first.weight", "first.bias", "second.bias"]
    assert list(engine.full_state(model)) == ["first.weight", "first.bias", "second.weight", "second.bias"]


def test_order_of_parameters_is_that_of_the_module(engine, wrap):
    model = wrap(on_meta(lambda: nn.Linear(4, 2)), use_orig_params=True)
    assert list(engine.full_parameters(model)) == ["weight", "bias"]


def init_nothing(module):
    """Leave all on meta."""


def init_below(module):
    """Give storage to what is below as well."""
    module.to_empty(device="cpu")


REFUSED = {
    "below": (lambda: nn.Sequential(nn.ReLU(), Bare()), {}, r"module '1' \(Bare\) has 'weight'"),
    "root": (Bare, {}, r"^(?!.*'').*: Bare has 'weight'"),
    "left": (Bare, {"param_init_fn": init_nothing}, "left 'weight' of Bare"),
    "recursion": (lambda: Filled(Filled()), {"param_init_fn": init_below}, r"'below\.0\.weight'|'0\.weight'"),
}


def test_what_cannot_be_initialised_is_refused_by_its_name(wrap, run_subtests):
    def claim(what):
        make, settings, text = REFUSED[what]
        with pytest.raises(ValueError, match=text):
            wrap(on_meta(make), **settings)

    run_subtests({"what": list(REFUSED)}, claim)


def test_a_model_may_give_its_memory_up_and_get_it_back(world, engine, shard, use_orig_params):
    """It is moved to the meta device, and later given memory and its values."""
    require(engine, Capability.SUMMON)
    model = shard(nn.Linear(3, 4), use_orig_params=use_orig_params)
    before = engine.full_parameters(model)
    engine.backward(model, model(torch.ones(2, 3, device=world.device)).sum())
    model.zero_grad()
    model.to("meta")
    model.to_empty(device=world.device)
    with engine.summon(model, writeback=True), torch.no_grad():
        for name, parameter in engine.unwrapped(model).named_parameters():
            parameter.copy_(before[name])
    assert_named_close(engine.full_parameters(model), before, EXACT)


@pytest.mark.inside
def test_a_weight_outlives_its_model(world, engine, shard):
    """That of a unit which keeps its own: a later backward of it does not miss the model."""
    seen = []
    bare = nn.Linear(3, 4, bias=False)
    bare.register_forward_hook(lambda layer, *_: seen.append(layer.weight))
    model = shard(bare, "NO_SHARD")
    model(torch.ones(2, 3, device=world.device))
    del model, bare
    gc.collect()
    torch.autograd.backward(seen[0].sum())  # the model is gone: no engine has a part in it
    assert seen[0].grad.tolist() == [[1.0] * 3] * 4
