"""The norm that gradients are clipped by: each gradient counts once, however it lies on the ranks."""

import copy

import pytest
import torch
from torch import nn

from harness.assertions import assert_named_close, assert_same_across_ranks, named_gradients
from harness.conformance import Capability, Precision, ShardSpec, offers, require
from harness.conformance.models import KnownGradient, KnownGradients, NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

F16, F32, F64 = torch.float16, torch.float32, torch.float64
INF = float("inf")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
EVERY_NORM = {"norm_type": [1.0, 2.0, 3.0, INF]}


class Parts(nn.ModuleDict):
    """Weights of its own children, each with the same gradient."""

    def forward(self, gradient):
        return torch.stack([module(gradient) for module in self.values()]).sum()


def shard(world, engine, bare, strategy="FULL_SHARD", **more):
    units = more.pop("units", getattr(bare, "units", ()))
    return engine.shard(bare.to(world.device), ShardSpec(strategy, units=units, **more))


def backward(world, model, mean):
    """Give each weight the gradient ``mean``, in the mean over ranks that see different ones."""
    spread = world.rank - (world.size - 1) / 2
    model(torch.as_tensor(mean, dtype=F32, device=world.device) * (1 + spread)).backward()


def train(world, reference, model):
    """Run a backward of both on the same batches: all of them, and this rank's part."""
    batches = torch.randn(4 * world.size, 8, device=world.device)
    reference(batches).square().mean().backward()
    model(batches.chunk(world.size)[world.rank]).square().mean().backward()


@pytest.mark.ranks(1, 2, 3)
@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_norm_and_clipped_gradients_equal_the_unsharded_ones(
    world, engine, run_subtests, strategy, use_orig_params
):
    """pytorch#88955: the norm was not reduced, or counted once per rank."""
    settings = {**EVERY_NORM, "offload_and_frozen": [False, True]}
    more = {"strategy": strategy, "use_orig_params": use_orig_params}
    run_subtests(settings, check_clipping, world, engine, **more)


def check_clipping(world, engine, strategy, use_orig_params, norm_type, offload_and_frozen):
    reference = NestedWrappedModule().to(world.device)
    bare = copy.deepcopy(reference)
    for module in (reference, bare):
        module.module[2].requires_grad_(not offload_and_frozen)
    spec = {"use_orig_params": use_orig_params, "offload": offload_and_frozen, "device": world.device}
    model = shard(world, engine, bare, strategy, **spec)
    train(world, reference, model)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    norm = engine.clip_grad_norm_(model, 0.01, norm_type)
    assert (norm.shape, norm.item() > 0.01) == ((), True)
    torch.testing.assert_close(norm.to(F32), expected)
    world.assert_same(norm)
    assert_named_close(engine.full_gradients(model), named_gradients(reference))


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_below_the_largest_norm_keep_every_bit(world, engine, strategy, use_orig_params):
    model = shard(world, engine, KnownGradients(3), strategy, use_orig_params=use_orig_params)
    backward(world, model, 1.5)
    assert engine.clip_grad_norm_(model, 1e4).item() == pytest.approx(1.5 * 12**0.5)
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1.5] * 3] * 4


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_rank_without_elements_takes_part(world, engine, run_subtests, shape, use_orig_params):
    """pytorch#99174: a rank with only empty shards did not join."""
    settings = {"strategy": STRATEGIES, **EVERY_NORM}
    run_subtests(settings, check_one_element, world, engine, shape=shape, use_orig_params=use_orig_params)


def check_one_element(world, engine, shape, use_orig_params, strategy, norm_type):
    model = shard(world, engine, KnownGradient(*shape), strategy, use_orig_params=use_orig_params)
    backward(world, model, -4.0)
    assert engine.full_gradients(model)["weight"].item() == -4
    norm = engine.clip_grad_norm_(model, 1.0, norm_type)
    assert norm.item() == pytest.approx(4.0)
    world.assert_same(norm)
    assert engine.full_gradients(model)["weight"].item() == pytest.approx(-1.0, rel=1e-5)


@EVERY_STRATEGY
@pytest.mark.parametrize("norm_type", EVERY_NORM["norm_type"])
def test_an_ignored_part_that_all_ranks_hold_counts_once(world, engine, strategy, norm_type):
    bare = Parts({"frozen": KnownGradient(2), "ignored": KnownGradient(2), "cut": KnownGradient(3)}).to(
        world.device
    )
    bare["frozen"].requires_grad_(False)
    ignored = bare["ignored"].weight
    model = shard(world, engine, bare, strategy, ignored=("ignored",), use_orig_params=True)
    backward(world, model, 2.0)
    ignored.grad = torch.full_like(ignored, 2.0)  # its ranks are the user's to keep equal
    expected = 2.0 if norm_type == INF else 2.0 * 5 ** (1 / norm_type)
    assert engine.clip_grad_norm_(model, 0.5, norm_type).item() == pytest.approx(expected)
    gradients = engine.full_gradients(model)
    assert gradients["cut.weight"].tolist() == pytest.approx([1.0 / expected] * 3, rel=1e-5)
    assert gradients["ignored.weight"].tolist() == pytest.approx([1.0 / expected] * 2, rel=1e-5)
    assert gradients["frozen.weight"] is None


@pytest.mark.parametrize("norm_type", EVERY_NORM["norm_type"])
def test_units_of_different_strategies_count_once_each(world, engine, norm_type):
    parts = {strategy: shard(world, engine, KnownGradient(3), strategy) for strategy in STRATEGIES}
    model = shard(world, engine, Parts(parts))
    backward(world, model, 2.0)
    expected = 2.0 if norm_type == INF else 2.0 * 9 ** (1 / norm_type)
    assert engine.clip_grad_norm_(model, 0.5, norm_type).item() == pytest.approx(expected)


@EVERY_STRATEGY
def test_the_norm_of_low_precision_gradients_is_taken_in_fp32(world, engine, strategy):
    precision = Precision(F16, keep_low_precision_grads=True)
    model = shard(world, engine, KnownGradient(3), strategy, precision=precision, use_orig_params=True)
    backward(world, model, 512.0)  # its square is beyond fp16
    assert engine.clip_grad_norm_(model, 1.0).item() == pytest.approx(512 * 3**0.5)
    assert engine.full_gradients(model)["weight"].tolist() == pytest.approx([3**-0.5] * 3, rel=1e-3)


@EVERY_STRATEGY
def test_the_norm_of_fp64_gradients_is_taken_in_fp64(world, engine, strategy):
    model = shard(world, engine, KnownGradient(2).double(), strategy)
    model(torch.tensor([1.0, 2.0**-30], dtype=F64, device=world.device)).backward()
    assert engine.clip_grad_norm_(model, 1e4, 1.0).item() == 1 + 2.0**-30


@EVERY_STRATEGY
def test_clipping_sends_one_number_once(world, engine, collectives, strategy):
    model = shard(world, engine, KnownGradients(3), strategy)
    backward(world, model, 2.0)
    before = len(collectives)
    engine.clip_grad_norm_(model, 1.0)
    expected = [] if strategy == "NO_SHARD" else [("all_reduce", ((),))]
    sent = collectives.entries[before:]
    assert [entry.op for entry in sent] == [op for op, _ in expected]
    if offers(engine, Capability.ONE_NORM):  # where norms are of parameters, all of them travel at once
        assert [(entry.op, entry.shapes) for entry in sent] == expected


@EVERY_STRATEGY
@pytest.mark.parametrize("norm_type", EVERY_NORM["norm_type"])
def test_without_any_gradient_the_norm_is_zero(world, engine, strategy, norm_type):
    model = shard(world, engine, KnownGradients(3), strategy)
    assert engine.clip_grad_norm_(model, 1.0, norm_type).item() == 0


@EVERY_STRATEGY
@pytest.mark.parametrize("norm_type", EVERY_NORM["norm_type"])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_nonfinite_gradient_in_one_shard_is_seen_by_all_ranks(world, engine, strategy, norm_type, bad):
    model = shard(world, engine, KnownGradient(3), strategy)
    model(torch.tensor([1.0, 1.0, bad if world.rank else 1.0], device=world.device)).backward()
    norm = engine.clip_grad_norm_(model, 1.0, norm_type).item()
    assert world.gather(repr(norm)) == [repr(bad)] * 2


@EVERY_STRATEGY
def test_unreduced_gradients_are_refused(world, engine, strategy):
    model = shard(world, engine, KnownGradients(3), strategy)
    require(engine, Capability.UNSYNCED_GRADIENTS)
    with engine.no_sync(model):
        backward(world, model, 1.0)
    with pytest.raises(RuntimeError, match="gradients from no_sync are not reduced yet"):
        engine.clip_grad_norm_(model, 1.0)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_clipped_steps_move_the_weights_as_unsharded_ones(world, engine, strategy, use_orig_params):
    reference = NestedWrappedModule().to(world.device)
    model = shard(world, engine, copy.deepcopy(reference), strategy, use_orig_params=use_orig_params)
    optimizers = [torch.optim.SGD(module.parameters(), lr=10.0) for module in (reference, model)]
    for _ in range(2):
        train(world, reference, model)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        engine.clip_grad_norm_(model, 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_named_close(engine.full_parameters(model), dict(reference.named_parameters()))
    assert_same_across_ranks(engine.full_parameters(model))
