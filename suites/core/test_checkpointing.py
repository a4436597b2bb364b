"""Activation checkpointing: gathers for recomputation, whole gradients, and no group left gathered."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, named_gradients
from lockstep.conformance import Capability, offers

pytestmark = pytest.mark.ranks(2)

BOTH_KINDS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])


class Around(nn.Module):
    """A unit whose forward is checkpointed from outside; then the root's own layer."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.before = nn.Linear(4, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.before(x), use_reentrant=self.use_reentrant)


class Within(nn.Sequential):
    """A module that checkpoints a part of what it does."""

    def __init__(self, use_reentrant):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self[2](checkpoint(nn.Sequential(self[0], self[1]), x, use_reentrant=self.use_reentrant))


class Tied(nn.Module):
    """An embedding and the output layer that shares its weight, both of them recomputed in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight
        self.use_reentrant = use_reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in (self.inner, self.output):
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Unheard(nn.Module):
    """A layer that comes after a checkpointed segment, and in it, where what it returns is dropped."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.layer(checkpoint(self.segment, x, use_reentrant=self.use_reentrant))

    def segment(self, x):
        self.layer(x)
        return self.inner(x).tanh()


def gathered_bytes(engine, log, in_backward):
    return [entry.nbytes for entry in engine.traffic(log).gathers if entry.in_backward == in_backward]


# The root holds 40 elements, the unit below it 144; each of two ranks hands in half of them.
ROOT, INNER = 4 * 40 // 2, 4 * 144 // 2


@BOTH_KINDS
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [(s, o) for s in ("FULL_SHARD", "SHARD_GRAD_OP") for o in (False, True)]
)
@pytest.mark.inside
def test_a_checkpointed_unit_is_gathered_once_in_backward(
    world, engine, shard, collectives, strategy, use_orig_params, use_reentrant
):
    spec = {"units": ("inner",), "use_orig_params": use_orig_params}
    model = shard(Around(use_reentrant), strategy, **spec)
    engine.backward(model, model(torch.randn(2, 4, device=world.device) + world.rank).sum())
    # The reentrant kind runs forward without autograd, so that nothing is kept for backward.
    kept = strategy == "SHARD_GRAD_OP"
    expected = ([] if kept else [ROOT]) + ([] if kept and not use_reentrant else [INNER])
    assert gathered_bytes(engine, collectives, in_backward=False) == [ROOT, INNER]
    assert sorted(gathered_bytes(engine, collectives, in_backward=True)) == expected
    assert [entry.nbytes for entry in engine.traffic(collectives).reductions] == [2 * INNER, 2 * ROOT]


@BOTH_KINDS
@pytest.mark.parametrize(("strategy", "again"), [("FULL_SHARD", [INNER]), ("SHARD_GRAD_OP", [])])
@pytest.mark.inside
def test_a_partly_checkpointed_unit_is_gathered_once_more(
    world, engine, shard, collectives, strategy, again, use_reentrant
):
    model = shard(Within(use_reentrant), strategy)
    x = torch.randn(2, 8, device=world.device, requires_grad=True)
    engine.backward(model, model(x).sum())
    assert gathered_bytes(engine, collectives, in_backward=False) == [INNER]
    assert gathered_bytes(engine, collectives, in_backward=True) == again


@BOTH_KINDS
@pytest.mark.inside
def test_a_unit_is_gathered_once_for_segments_that_share_its_weight(
    world, engine, shard, collectives, use_reentrant
):
    """Each of them is a backward of its own, of the reentrant kind; the second needs what the first read."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=use_reentrant)
            return x

    model = shard(Twice().to(world.device), "FULL_SHARD")
    engine.backward(model, model(torch.ones(2, 8, device=world.device, requires_grad=True)).sum())
    size = 8 * 8 * 4 // world.size
    assert gathered_bytes(engine, collectives, in_backward=True) == [size]


@BOTH_KINDS
@pytest.mark.parametrize("make", [Around, Within])
def test_every_original_parameter_gets_its_piece_of_the_gradient(
    world, engine, shard, strategy, make, use_reentrant
):
    """pytorch#87413: with original parameters and the reentrant kind post-backward never ran."""
    units = ("inner",) if make is Around else ()
    model = shard(make(use_reentrant), strategy, units=units, use_orig_params=True)
    x = torch.randn(2, 4 if make is Around else 8, device=world.device, requires_grad=True)
    engine.backward(model, model(x).sum())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (parameter.numel() > 0), name
        assert parameter.numel() == 0 or parameter.grad.shape == parameter.shape, name
    if offers(engine, Capability.GROUPS):
        assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}


@BOTH_KINDS
def test_a_tied_weight_is_counted_once_per_use(
    world, engine, shard, strategy, use_orig_params, use_reentrant
):
    """DeepSpeed#988: under checkpointing it was counted twice."""
    bare = Tied(use_reentrant).to(world.device)
    model = shard(copy.deepcopy(bare), strategy, use_orig_params=use_orig_params)
    tokens = torch.arange(4 * world.size, device=world.device) % 5
    bare(tokens).square().mean().backward()
    engine.backward(model, model(tokens.chunk(world.size)[world.rank]).square().mean())
    assert_named_close(engine.full_gradients(model), named_gradients(bare))


@BOTH_KINDS
def test_recomputation_accumulates_in_no_sync(world, engine, shard, collectives, strategy, use_reentrant):
    bare = Around(use_reentrant).to(world.device)
    model = shard(copy.deepcopy(bare), strategy, units=("inner",))
    batches = torch.randn(3, 2 * world.size, 4, device=world.device)
    for batch in batches:
        bare(batch).square().mean().backward()
    with engine.no_sync(model):
        for batch in batches[:2]:
            engine.backward(model, model(batch.chunk(world.size)[world.rank]).square().mean())
    if offers(engine, Capability.TRAFFIC):
        assert engine.traffic(collectives).reductions == ()
    engine.backward(model, model(batches[2].chunk(world.size)[world.rank]).square().mean())
    assert_named_close(engine.full_gradients(model), named_gradients(bare))


@BOTH_KINDS
@pytest.mark.parametrize("units", [(), ("inner",)], ids=["one_unit", "two_units"])
def test_a_segment_reads_a_layer_that_has_all_its_gradients(
    world, engine, shard, strategy, units, use_reentrant
):
    """Backward computes the segment again when the last gradient of the layer has come."""
    bare = Unheard(use_reentrant).to(world.device)
    model = shard(copy.deepcopy(bare), strategy, units=units, use_orig_params=True)
    inputs = torch.randn(2 * world.size, 8, device=world.device, requires_grad=True)
    bare(inputs).square().mean().backward()
    engine.backward(model, model(inputs.chunk(world.size)[world.rank]).square().mean())
    assert_named_close(engine.full_gradients(model), named_gradients(bare))
    if offers(engine, Capability.GROUPS):
        assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}
