"""The built-in engine computes what an unsharded fp32 model computes on all ranks' batches together."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.adapters import ShardSpec
from harness.assertions import assert_named_close, assert_same_across_ranks
from harness.engine import FullyShardedDataParallel, ShardingStrategy, groups
from harness.zoo import AlwaysWrapNestedWrappedModule, NestedWrappedModule

pytestmark = pytest.mark.ranks(1, 2, 3)

STRATEGIES = [strategy.name for strategy in ShardingStrategy if not strategy.is_hybrid]
PRODUCT = {"strategy": STRATEGIES, "use_orig_params": [False, True]}


class OddShapes(nn.Module):
    """Parameters of no, one, none and few elements, a tied weight, and a layer that is used twice."""

    units = ("twice",)

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(8, 5)
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last = nn.Linear(5, 8, bias=False)
        self.tied = nn.Linear(5, 8)
        self.tied.weight = self.last.weight

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)) * self.scalar)
        return {"outputs": [self.last(x), (self.tied(x) + self.one,)], "count": 2}


class Frozen(nn.Sequential):
    """Frozen layers between trainable ones of the same group, read by backward after the latter are done."""

    units = ("0",)

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self[1].requires_grad_(False)
        self[2].requires_grad_(False)


class Checkpointed(nn.Module):
    """Layers that are computed a second time in backward: a unit, or with ``units=()`` a part of one."""

    def __init__(self, use_reentrant, units=("inner",)):
        super().__init__()
        self.units = units
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.after(x)


def loss_of(output):
    leaves = torch.utils._pytree.tree_leaves(output)
    return sum(t.square().mean() for t in leaves if isinstance(t, torch.Tensor))


def gradients_of(bare):
    return {name: parameter.grad for name, parameter in bare.named_parameters()}


def with_elements(gradients):
    """Drop parameters of no elements: they lie on no rank, so none shows a gradient for them."""
    return {name: gradient for name, gradient in gradients.items() if not name.startswith("empty")}


def check_two_accumulated_steps(world, engine, bare, **point):
    """Train both models two steps of two backwards each; compare gradients and parameters."""
    spec = ShardSpec(units=bare.units, device=world.device, **point)
    reference, model = copy.deepcopy(bare).to(world.device), engine.shard(copy.deepcopy(bare), spec)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (reference, model)]
    for _, optimizer in itertools.product(range(2), optimizers[:1]):
        batches = torch.randn(2, 2 * world.size, 8, device=world.device)
        for batch in batches:
            loss_of(reference(batch)).backward()
            loss_of(model(batch.chunk(world.size)[world.rank])).backward()
        assert_named_close(
            with_elements(engine.full_gradients(model)), with_elements(gradients_of(reference))
        )
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
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed_inside_a_unit": lambda: Checkpointed(use_reentrant=False, units=()),
    "checkpointed_inside_a_unit_reentrant": lambda: Checkpointed(use_reentrant=True, units=()),
}


@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_parameters_equal_the_unsharded_ones(world, engine, run_subtests, model):
    run_subtests(PRODUCT, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", MODELS)
def test_offloaded_shards_train_the_same(world, engine, run_subtests, model):
    settings = {**PRODUCT, "offload": [True]}
    run_subtests(settings, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_reads_memory_that_was_freed_or_sent(world, engine, run_subtests, monkeypatch, model):
    monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")  # which fills it with NaN
    settings = {"strategy": STRATEGIES, "use_orig_params": [True]}
    run_subtests(settings, check_two_accumulated_steps, world, engine, bare=MODELS[model]())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_of_a_group_stay_readable_in_backward(world, engine, monkeypatch, strategy):
    monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")
    check_two_accumulated_steps(world, engine, Frozen(), strategy=strategy, use_orig_params=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_reaches_the_input_through_a_wholly_frozen_unit(world, engine, strategy):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False).to(world.device)
    model = engine.shard(copy.deepcopy(bare), ShardSpec(strategy, units=("0",), device=world.device))
    inputs = [torch.ones(2, 8, device=world.device, requires_grad=True) for _ in range(2)]
    for module, x in zip((bare, model), inputs, strict=True):
        module(x).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_twice_over_one_graph_gives_exactly_twice(world, engine, strategy):
    model = engine.shard(NestedWrappedModule(), ShardSpec(strategy, units=("module.2",), device=world.device))
    loss = loss_of(model(torch.randn(4, 8, device=world.device)))
    loss.backward(retain_graph=True)
    once = engine.full_gradients(model)
    loss.backward()
    for name, gradient in engine.full_gradients(model).items():
        assert torch.equal(gradient, 2 * once[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_and_one_backward_add_up(world, engine, strategy):
    bare = NestedWrappedModule().to(world.device)
    model = engine.shard(copy.deepcopy(bare), ShardSpec(strategy, units=bare.units, device=world.device))
    batch = torch.randn(2, 4, 8, device=world.device)
    for module in (bare, model):
        first = loss_of(module(batch[0]))
        with torch.no_grad():
            module(batch[0])
        (first + loss_of(module(batch[1]))).backward()
    assert_named_close(engine.full_gradients(model), gradients_of(bare))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_skipped_in_a_step_or_left_out_of_the_loss_has_no_gradient(world, engine, strategy):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unheard, self.skipped = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.used(x), self.unheard(x)

    model = engine.shard(Branches(), ShardSpec(strategy, units=(nn.Linear,), device=world.device))
    model(torch.ones(2, 8, device=world.device))[0].sum().backward()
    held = {group.name: group.gradient_dtype for group in engine.groups(model)}
    assert held == {"used": torch.float32, "unheard": None, "skipped": None}
    assert {group.gathered_bytes for group in engine.groups(model)} == {0}


def test_recurrent_weights_follow_the_sharding(world, engine):
    bare = nn.LSTM(8, 4).to(world.device)
    model = engine.shard(copy.deepcopy(bare), ShardSpec(use_orig_params=True, device=world.device))
    x = torch.randn(3, 2, 8, device=world.device)
    for module in (bare, model):
        module(x)[0].sum().backward()
    assert_named_close(engine.full_gradients(model), gradients_of(bare))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_optimizer_built_after_a_first_forward_moves_the_weights(world, use_orig_params):
    model = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), use_orig_params=use_orig_params)
    x = torch.ones(2, 8, device=world.device)
    before = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    # d(sum)/d(weight) is 2 everywhere, so each of 8 weights of a row takes off 0.2, the bias 0.2 as well.
    torch.testing.assert_close(model(x), before - 9 * 0.2)


def test_evaluation_and_inference_mode_leave_training_possible(world):
    model = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), use_orig_params=True).eval()
    x = torch.ones(2, 8, device=world.device)
    with torch.inference_mode():
        inferred = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), inferred)
    model.train()(x).sum().backward()
    assert [group.gradient_dtype for group in groups(model)] == [torch.float32]
