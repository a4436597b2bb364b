"""Parity of models of awkward shape and order with an unsharded one that sees all ranks' batches."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import (
    assert_named_close,
    assert_same_across_ranks,
    assert_sharded_parity,
    named_gradients,
)
from lockstep.conformance import Capability, offers
from lockstep.conformance.models import AlwaysWrapNestedWrappedModule, NestedWrappedModule, copier
from lockstep.recorders.tensors import named_tensors

pytestmark = pytest.mark.ranks(2)


class OddShapes(nn.Module):
    """Parameters of no, one, none and few elements, a tied weight, and a layer that is used twice."""

    units = ("twice", "tiny")

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(8, 5)
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.tiny = nn.Linear(1, 1, bias=False)  # on most ranks its shard is padding
        self.last = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.last.weight

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)) * self.scalar)
        return {
            "outputs": [self.last(x), (self.tied(x) + self.one,)],
            "tiny": self.tiny(x[:, :1]),
            "count": 2,
        }


class OddDimensions(OddShapes):
    """The same with no parameter that has no dimension to shard, and with the one of no elements in use."""

    def __init__(self):
        super().__init__()
        del self.scalar
        self.scalar = 1.5

    def forward(self, x):
        return {**super().forward(x), "empty": self.empty.sum()}


@dataclasses.dataclass
class Result:
    """An output that has tensors deep inside, and other values."""

    values: dict[str, list[torch.Tensor]]
    name: str = "result"
    nothing: None = None


class Containers(nn.Module):
    """Units that take and return a dataclass with containers in it."""

    units = ("inner", "inner.inner")

    def __init__(self, depth=2):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = Containers(depth - 1) if depth else None

    def forward(self, x):
        given = x.values["to"][0] if isinstance(x, Result) else x
        result = Result({"to": [self.layer(given), given.detach()], "empty": []})
        return self.inner(result) if self.inner else result


class Frozen(nn.Sequential):
    """Frozen layers between trainable ones of the same group, read by backward after the latter are done."""

    units = ("0",)

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self[1].requires_grad_(False)
        self[2].requires_grad_(False)


class FrozenTwice(nn.Sequential):
    """A frozen unit that is given what it returned: its second backward ends where its first begins."""

    units = ("1",)

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self[1].requires_grad_(False)

    def forward(self, x):
        return self[2](self[1](self[1](self[0](x))))


class Thawing(nn.Sequential):
    """A layer that is frozen in every other step: a unit, or with `units=()` a part of one."""

    def __init__(self, units=("1",)):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.units = units

    def begin(self, step):
        self[1].requires_grad_(step % 2 == 1)


class ThawingBesideFrozen(Thawing):
    """The same, with a part of a group that never learns."""

    def __init__(self):
        super().__init__()
        self[2].bias.requires_grad_(False)


class Skipping(nn.Sequential):
    """Units of which each step leaves one out, and another's output never reaches the loss."""

    units = (nn.Linear,)

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.step = 0

    def begin(self, step):
        self.step = step

    def forward(self, x):
        used = [layer for index, layer in enumerate(self) if index != self.step % 3]
        return {"heard": used[0](x), "unheard": used[1](x).detach()}


class Nothing(nn.Module):
    """A unit whose only parameter has no elements, and one that has some."""

    units = ("empty", "layer")

    def __init__(self):
        super().__init__()
        self.empty, self.layer = nn.Embedding(0, 8), nn.Linear(8, 8)

    def forward(self, x):
        nothing = self.empty(torch.zeros(0, dtype=torch.int64, device=x.device))
        return self.layer(x) + nothing.sum()


class Checkpointed(nn.Module):
    """Layers that are computed a second time in backward: a unit, or with `units=()` a part of one."""

    def __init__(self, use_reentrant, units=("inner",), times=2):
        super().__init__()
        self.units, self.times = units, times
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.inner[2].weight = self.inner[0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.before(x)
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.after(x)


def loss_of(output):
    heard = named_tensors(output)
    return sum(tensor.square().mean() for tensor in heard.values())


def with_elements(gradients):
    """Drop parameters of no elements: they lie on no rank, so none shows a gradient for them."""
    return {name: gradient for name, gradient in gradients.items() if not name.startswith("empty")}


@pytest.fixture
def check_training(world, engine, fronts):
    """Train two copies two steps of two backwards each, one sharded; compare gradients and parameters."""

    def check(front, copied, **spec):
        front = fronts[front]
        reference, inner = copied().to(world.device), copied()
        model = front.shard(inner, **spec)
        adam = partial(torch.optim.Adam, lr=0.1)
        optimizers = [adam(reference.parameters()), front.optimizer(model, adam)]
        for step in range(2):
            for module in (reference, inner):
                getattr(module, "begin", lambda step: None)(step)
            for batch in torch.randn(2, 2 * world.size, 8, device=world.device):
                loss_of(reference(batch)).backward()
                front.backward(model, loss_of(model(batch.chunk(world.size)[world.rank])))
            check_gradients(front, model, reference)
            if offers(engine, Capability.GROUPS):
                assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_named_close(front.full_parameters(model), dict(reference.named_parameters()))
        if world.size > 1:
            assert_same_across_ranks(front.full_parameters(model))

    return check


def check_gradients(front, model, reference):
    if front.is_composable:
        assert_sharded_parity(model, reference)
    else:
        actual, expected = front.full_gradients(model), named_gradients(reference)
        assert_named_close(with_elements(actual), with_elements(expected))


MODELS = {
    "nested": NestedWrappedModule,
    "always_wrapped": AlwaysWrapNestedWrappedModule,
    "odd_shapes": OddShapes,
    "odd_dimensions": OddDimensions,
    "containers": Containers,
    "frozen_twice": FrozenTwice,
    "thawing": Thawing,
    "thawing_beside_frozen": ThawingBesideFrozen,
    "skipping": Skipping,
    "nothing": Nothing,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed_once_reentrant": lambda: Checkpointed(use_reentrant=True, times=1),
    "checkpointed_inside_a_unit": lambda: Checkpointed(use_reentrant=False, units=()),
    "checkpointed_inside_a_unit_reentrant": lambda: Checkpointed(use_reentrant=True, units=()),
}
PARTLY_FROZEN = {"frozen": Frozen, "thawing_in_part": lambda: Thawing(units=())}

WITH_ORIGINALS = ["FULL_SHARD-orig", "SHARD_GRAD_OP-orig", "NO_SHARD-orig"]
OWN = ["FULL_SHARD-flat", "SHARD_GRAD_OP-flat", "NO_SHARD-flat", *WITH_ORIGINALS]
COMPOSABLE = ["fully_shard", "replicate"]


# A composable front has no place for parameters without dimensions; three models are variants for it alone.
FRONTS = dict.fromkeys(MODELS, OWN + COMPOSABLE) | {
    "odd_shapes": OWN,
    "odd_dimensions": COMPOSABLE,
    "checkpointed_once_reentrant": COMPOSABLE,
    "thawing_beside_frozen": COMPOSABLE,
}
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)


@pytest.mark.ranks(1, 2, 3)
@EVERY_MODEL
def test_gradients_and_parameters_equal_the_unsharded_ones(check_training, run_subtests, model):
    run_subtests({"front": FRONTS[model]}, check_training, copied=copier(MODELS[model]()))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", ["nested", "odd_shapes", "odd_dimensions", "nothing"])
def test_four_ranks_that_mostly_hold_nothing_train_the_same(check_training, run_subtests, model):
    run_subtests({"front": FRONTS[model]}, check_training, copied=copier(MODELS[model]()))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("model", PARTLY_FROZEN)
def test_frozen_parts_of_a_group_stay_as_they_are(check_training, run_subtests, model):
    copied = copier(PARTLY_FROZEN[model]())
    run_subtests({"front": WITH_ORIGINALS + COMPOSABLE}, check_training, copied=copied)


@EVERY_MODEL
def test_offloaded_shards_train_the_same(check_training, run_subtests, model):
    """torch 2.13 refuses its default on a host without accelerator: it pins memory."""
    settings = {"front": FRONTS[model], "offload": [True]}
    run_subtests(settings, check_training, copied=copier(MODELS[model]()))


@pytest.mark.parametrize("model", [model for model, fronts in FRONTS.items() if OWN[0] in fronts])
def test_models_train_the_same_when_memory_is_really_freed(monkeypatch, check_training, run_subtests, model):
    # It fills memory with NaN and holds it.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    run_subtests({"front": WITH_ORIGINALS}, check_training, copied=copier(MODELS[model]()))


@pytest.mark.parametrize("model", [model for model, fronts in FRONTS.items() if "fully_shard" in fronts])
def test_models_train_the_same_freed_or_kept_after_forward(check_training, run_subtests, model):
    settings = {"front": ["fully_shard"], "reshard_after_forward": [True, False]}
    run_subtests(settings, check_training, copied=copier(MODELS[model]()))


def test_gradient_reaches_the_input_through_a_wholly_frozen_unit(world, engine, shard, strategy):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False).to(world.device)
    model = shard(copy.deepcopy(bare), strategy, units=("0",))
    inputs = [torch.full((2, 8), world.rank + 1.0, device=world.device, requires_grad=True) for _ in range(2)]
    bare(inputs[0]).sum().backward()
    engine.backward(model, model(inputs[1]).sum())
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    if offers(engine, Capability.GROUPS):
        assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@pytest.mark.parametrize("partly", [False, True], ids=["wholly", "partly"])
def test_a_frozen_layer_is_read_until_the_last_input_has_its_gradient(world, engine, shard, strategy, partly):
    """Of a unit that is called on its own output, or that trains another layer after it."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.inner.requires_grad_(False)
            self.inner[2].requires_grad_(partly)

        def forward(self, x):
            x = self.inner(self.before(x))
            return x if partly else self.inner(x)

    bare = Twice().to(world.device)
    model = shard(copy.deepcopy(bare), strategy, units=("inner",), use_orig_params=True)
    x = torch.ones(2, 8, device=world.device)
    for _ in range(2):
        bare(x).sum().backward()
        engine.backward(model, model(x).sum())
    found = engine.full_gradients(model)
    expected = {name: p.grad for name, p in bare.named_parameters() if p.requires_grad}
    assert_named_close({name: found[name] for name in expected}, expected)


def test_recurrent_weights_follow_the_sharding(world, engine, shard, strategy, use_orig_params):
    bare = nn.LSTM(8, 4).to(world.device)
    model = shard(copy.deepcopy(bare), strategy, use_orig_params=use_orig_params)
    x = torch.randn(3, 2 * world.size, 8, device=world.device)
    (bare(x)[0].sum() / world.size).backward()
    engine.backward(model, model(x.chunk(world.size, dim=1)[world.rank])[0].sum())
    assert_named_close(engine.full_gradients(model), named_gradients(bare))
