"""The norm that gradients are clipped by: each gradient counts once, however it lies on the ranks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    assert_named_close,
    assert_same_across_ranks,
    assert_sharded_parity,
    named_gradients,
)
from lockstep.conformance import Capability, Precision, offers, require
from lockstep.conformance.models import KnownGradient, KnownGradients, NestedWrappedModule, copier

pytestmark = pytest.mark.ranks(2)

F16, F32, F64 = torch.float16, torch.float32, torch.float64
INF = float("inf")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
NORMS = [1.0, 2.0, 3.0, INF]
EVERY_NORM = pytest.mark.parametrize("norm_type", NORMS)


def norms(front, *, has_empty_shards=False, has_nan=False):
    """Return the types of norms that torch takes of DTensors: no largest one of empty shards or of NaN."""
    return NORMS[:-1] if front.is_composable and (has_empty_shards or has_nan) else NORMS


class Parts(nn.ModuleDict):
    """Weights of its own children, each with the same gradient."""

    def forward(self, gradient):
        return torch.stack([module(gradient) for module in self.values()]).sum()


@pytest.fixture
def backward(world):
    """Give each weight the gradient `mean`, in the mean over ranks that see different ones."""

    def backward(front, model, mean):
        spread = world.rank - (world.size - 1) / 2
        front.backward(model, model(torch.as_tensor(mean, dtype=F32, device=world.device) * (1 + spread)))

    return backward


def train(world, front, reference, model):
    """Run a backward of both on the same batches: all of them, and this rank's part."""
    batches = torch.randn(4 * world.size, 8, device=world.device)
    reference(batches).square().mean().backward()
    front.backward(model, model(batches.chunk(world.size)[world.rank]).square().mean())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.basic(4)
def test_norm_and_clipped_gradients_equal_the_unsharded_ones(world, front, run_subtests):
    """pytorch#88955: the norm was not reduced, or counted once per rank."""
    copied = copier(NestedWrappedModule())

    def check(norm_type, offload_and_frozen=False, **how):
        reference, bare = copied().to(world.device), copied()
        for module in (reference, bare):
            module.module[2].requires_grad_(not offload_and_frozen)
        model = front.shard(bare, offload=offload_and_frozen)
        train(world, front, reference, model)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        norm = front.clip_grad_norm_(model, 0.01, norm_type, **how)
        assert (norm.shape, norm.item() > 0.01) == ((), True)
        torch.testing.assert_close(norm.to(F32), expected)
        world.assert_same(norm)
        assert_named_close(front.full_gradients(model), named_gradients(reference))
        if front.is_composable:
            assert_sharded_parity(model, reference)

    more = {"foreach": [True, False]} if front.is_composable else {"offload_and_frozen": [False, True]}
    run_subtests({"norm_type": norms(front, has_empty_shards=world.size == 3), **more}, check)


def test_gradients_below_the_largest_norm_keep_every_bit(front, backward, run_subtests):
    def check(value):
        model = front.shard(KnownGradients(3))
        backward(front, model, value)
        assert front.clip_grad_norm_(model, 1e4).item() == pytest.approx(value * 12**0.5)
        assert [g.tolist() for g in front.full_gradients(model).values()] == [[value] * 3] * 4

    run_subtests({"value": [1.5, 2.0**-24]}, check)


@pytest.mark.ranks(1, 2, 4)
def test_a_rank_without_elements_takes_part(world, front, backward, run_subtests):
    """pytorch#99174: a rank with only empty shards did not join."""

    def check(shape, norm_type):
        model = front.shard(KnownGradient(*shape))
        backward(front, model, -4.0)
        assert front.full_gradients(model)["weight"].item() == -4
        norm = front.clip_grad_norm_(model, 1.0, norm_type)
        assert norm.item() == pytest.approx(4.0)
        world.assert_same(norm)
        assert front.full_gradients(model)["weight"].item() == pytest.approx(-1.0, rel=1e-5)

    shapes = [(1,)] if front.is_composable else [(), (1,)]  # without dimensions there is none to shard
    run_subtests({"shape": shapes, "norm_type": norms(front, has_empty_shards=True)}, check)


@EVERY_NORM
def test_an_ignored_part_that_all_ranks_hold_counts_once(world, engine, shard, backward, strategy, norm_type):
    bare = Parts({"frozen": KnownGradient(2), "ignored": KnownGradient(2), "sharded": KnownGradient(3)}).to(
        world.device
    )
    bare["frozen"].requires_grad_(False)
    ignored = bare["ignored"].weight
    model = shard(bare, strategy, ignored=("ignored",), use_orig_params=True)
    backward(engine, model, 2.0)
    ignored.grad = torch.full_like(ignored, 2.0)  # its ranks are the user's to keep equal
    expected = 2.0 if norm_type == INF else 2.0 * 5 ** (1 / norm_type)
    assert engine.clip_grad_norm_(model, 0.5, norm_type).item() == pytest.approx(expected)
    gradients = engine.full_gradients(model)
    assert gradients["sharded.weight"].tolist() == pytest.approx([1.0 / expected] * 3, rel=1e-5)
    assert gradients["ignored.weight"].tolist() == pytest.approx([1.0 / expected] * 2, rel=1e-5)
    assert gradients["frozen.weight"] is None


@EVERY_NORM
def test_units_of_different_strategies_count_once_each(engine, shard, backward, norm_type):
    parts = {strategy: shard(KnownGradient(3), strategy) for strategy in STRATEGIES}
    model = shard(Parts(parts))
    backward(engine, model, 2.0)
    expected = 2.0 if norm_type == INF else 2.0 * 9 ** (1 / norm_type)
    assert engine.clip_grad_norm_(model, 0.5, norm_type).item() == pytest.approx(expected)


def test_the_norm_of_low_precision_gradients_is_taken_in_fp32(engine, shard, backward, strategy):
    precision = Precision(F16, keep_low_precision_grads=True)
    model = shard(KnownGradient(3), strategy, precision=precision, use_orig_params=True)
    backward(engine, model, 512.0)  # its square is beyond fp16
    assert engine.clip_grad_norm_(model, 1.0).item() == pytest.approx(512 * 3**0.5)
    assert engine.full_gradients(model)["weight"].tolist() == pytest.approx([3**-0.5] * 3, rel=1e-3)


def test_the_norm_of_fp64_gradients_is_taken_in_fp64(world, engine, shard, strategy):
    model = shard(KnownGradient(2).double(), strategy)
    engine.backward(model, model(torch.tensor([1.0, 2.0**-30], dtype=F64, device=world.device)))
    assert engine.clip_grad_norm_(model, 1e4, 1.0).item() == 1 + 2.0**-30


@pytest.mark.inside
def test_clipping_sends_one_number_once(engine, shard, backward, collectives, strategy):
    model = shard(KnownGradients(3), strategy)
    backward(engine, model, 2.0)
    before = len(collectives)
    engine.clip_grad_norm_(model, 1.0)
    expected = [] if strategy == "NO_SHARD" else [("all_reduce", ((),))]
    sent = collectives.entries[before:]
    assert [entry.op for entry in sent] == [op for op, _ in expected]
    if offers(engine, Capability.ONE_NORM):  # where norms are of parameters, all of them travel at once
        assert [(entry.op, entry.shapes) for entry in sent] == expected


@EVERY_NORM
def test_without_any_gradient_the_norm_is_zero(engine, shard, strategy, norm_type):
    model = shard(KnownGradients(3), strategy)
    assert engine.clip_grad_norm_(model, 1.0, norm_type).item() == 0


def test_all_ranks_see_a_nonfinite_gradient_in_one_shard(world, front, run_subtests):
    def check(norm_type, bad):
        model = front.shard(KnownGradient(3))
        gradient = torch.tensor([1.0, 1.0, bad if world.rank else 1.0], device=world.device)
        front.backward(model, model(gradient))
        norm = front.clip_grad_norm_(model, 1.0, norm_type).item()
        assert world.gather(repr(norm)) == [repr(bad)] * 2

    run_subtests({"norm_type": norms(front, has_nan=True), "bad": [INF, float("nan")]}, check)


def test_unreduced_gradients_are_refused(engine, shard, backward, strategy):
    bare = KnownGradients(3)
    bare[1].requires_grad_(False)  # a unit that has none
    model = shard(bare, strategy)
    require(engine, Capability.UNSYNCED_GRADIENTS)
    with engine.no_sync(model):
        backward(engine, model, 1.0)
    with pytest.raises(RuntimeError, match="gradients from no_sync are not reduced yet"):
        engine.clip_grad_norm_(model, 1.0)


def test_clipped_steps_move_the_weights_as_unsharded_ones(world, engine, shard, strategy, use_orig_params):
    reference = NestedWrappedModule().to(world.device)
    model = shard(copy.deepcopy(reference), strategy, use_orig_params=use_orig_params)
    sgd = partial(torch.optim.SGD, lr=10.0)
    optimizers = [sgd(reference.parameters()), engine.optimizer(model, sgd)]
    for _ in range(2):
        train(world, engine, reference, model)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        engine.clip_grad_norm_(model, 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_named_close(engine.full_parameters(model), dict(reference.named_parameters()))
    assert_same_across_ranks(engine.full_parameters(model))
