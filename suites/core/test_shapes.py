"""Models of awkward shape and order train as an unsharded one does on all ranks' batches together."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.assertions import assert_named_close, assert_same_across_ranks, named_gradients
from harness.conformance import Capability, ShardSpec, offers
from harness.conformance.models import AlwaysWrapNestedWrappedModule, NestedWrappedModule
from harness.recorders.tensors import named_tensors

pytestmark = pytest.mark.ranks(2)

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
PRODUCT = {"strategy": STRATEGIES, "use_orig_params": [False, True]}


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
        self.last = nn.Linear(5, 8, bias=False)
        self.tied = nn.Linear(5, 8)
        self.tied.weight = self.last.weight

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)) * self.scalar)
        return {
            "outputs": [self.last(x), (self.tied(x) + self.one,)],
            "tiny": self.tiny(x[:, :1]),
            "count": 2,
        }


@dataclasses.dataclass
class Result:
    """An output that has tensors deep inside, and more than those."""

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
    """A layer that is frozen in every other step: a unit, or with ``units=()`` a part of one."""

    def __init__(self, units=("1",)):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.units = units

    def begin(self, step):
        self[1].requires_grad_(step % 2 == 1)


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
    """A unit whose only parameter has no elements, beside one that has."""

    units = ("empty", "layer")

    def __init__(self):
        super().__init__()
        self.empty, self.layer = nn.Embedding(0, 8), nn.Linear(8, 8)

    def forward(self, x):
        nothing = self.empty(torch.zeros(0, dtype=torch.int64, device=x.device))
        return self.layer(x) + nothing.sum()


class Checkpointed(nn.Module):
    """Layers that are computed a second time in backward: a unit, or with ``units=()`` a part of one."""

    def __init__(self, use_reentrant, units=("inner",)):
        super().__init__()
        self.units = units
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.inner[2].weight = self.inner[0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.after(x)


def loss_of(output):
    heard = named_tensors(output)
    return sum(tensor.square().mean() for tensor in heard.values())


def with_elements(gradients):
    """Drop parameters of no elements: they lie on no rank, so none shows a gradient for them."""
    return {name: gradient for name, gradient in gradients.items() if not name.startswith("empty")}


def check_two_accumulated_steps(world, engine, bare, **point):
    """Train both models two steps of two backwards each; compare gradients and parameters."""
    reference, inner = copy.deepcopy(bare).to(world.device), copy.deepcopy(bare)
    model = engine.shard(inner, ShardSpec(units=bare.units, device=world.device, **point))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(2):
        for module in (reference, inner):
            getattr(module, "begin", lambda step: None)(step)
        for batch in torch.randn(2, 2 * world.size, 8, device=world.device):
            loss_of(reference(batch)).backward()
            loss_of(model(batch.chunk(world.size)[world.rank])).backward()
        assert_named_close(
            with_elements(engine.full_gradients(model)), with_elements(named_gradients(reference))
        )
        if offers(engine, Capability.GROUPS):
            assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_named_close(engine.full_parameters(model), dict(reference.named_parameters()))
    if world.size > 1:
        assert_same_across_ranks(engine.full_parameters(model))


MODELS = {
    "nested": NestedWrappedModule,
    "always_wrapped": AlwaysWrapNestedWrappedModule,
    "odd_shapes": OddShapes,
    "containers": Containers,
    "frozen_twice": FrozenTwice,
    "thawing": Thawing,
    "skipping": Skipping,
    "nothing": Nothing,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed_inside_a_unit": lambda: Checkpointed(use_reentrant=False, units=()),
    "checkpointed_inside_a_unit_reentrant": lambda: Checkpointed(use_reentrant=True, units=()),
}
# One flat parameter cannot be frozen in part.
PARTLY_FROZEN = {"frozen": Frozen, "thawing_in_part": lambda: Thawing(units=())}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_parameters_equal_the_unsharded_ones(world, engine, run_subtests, model):
    run_subtests(PRODUCT, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", ["nested", "odd_shapes", "nothing"])
def test_four_ranks_of_which_most_hold_no_part_of_a_parameter_train_the_same(
    world, engine, run_subtests, model
):
    run_subtests(PRODUCT, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("model", PARTLY_FROZEN)
def test_frozen_parts_of_a_group_stay_as_they_are(world, engine, run_subtests, model):
    settings = {"strategy": STRATEGIES, "use_orig_params": [True]}
    run_subtests(settings, check_two_accumulated_steps, world, engine, bare=PARTLY_FROZEN[model]())


@pytest.mark.parametrize("model", MODELS)
def test_offloaded_shards_train_the_same(world, engine, run_subtests, model):
    settings = {**PRODUCT, "offload": [True]}
    run_subtests(settings, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.parametrize("model", MODELS)
def test_models_train_the_same_when_memory_is_really_freed(world, engine, run_subtests, monkeypatch, model):
    # It fills memory with NaN and holds it.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    settings = {"strategy": STRATEGIES, "use_orig_params": [True]}
    run_subtests(settings, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@EVERY_STRATEGY
def test_gradient_reaches_the_input_through_a_wholly_frozen_unit(world, engine, strategy):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False).to(world.device)
    model = engine.shard(copy.deepcopy(bare), ShardSpec(strategy, units=("0",)))
    inputs = [torch.full((2, 8), world.rank + 1.0, device=world.device, requires_grad=True) for _ in range(2)]
    for module, x in zip((bare, model), inputs, strict=True):
        module(x).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    if offers(engine, Capability.GROUPS):
        assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_recurrent_weights_follow_the_sharding(world, engine, strategy, use_orig_params):
    bare = nn.LSTM(8, 4).to(world.device)
    model = engine.shard(copy.deepcopy(bare), ShardSpec(strategy, use_orig_params=use_orig_params))
    x = torch.randn(3, 2 * world.size, 8, device=world.device)
    (bare(x)[0].sum() / world.size).backward()
    model(x.chunk(world.size, dim=1)[world.rank])[0].sum().backward()
    assert_named_close(engine.full_gradients(model), named_gradients(bare))
