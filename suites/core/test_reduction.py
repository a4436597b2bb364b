"""Reduction of gradients: the exact mean over ranks, in the configured dtype."""

import gc
import time
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_same_across_ranks
from lockstep.conformance import Capability, Precision, require
from lockstep.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.basic(1)
def test_gradients_are_the_mean_over_ranks(world, front, run_subtests):
    """pytorch#162338: gloo gave the sum; #167178: no division at degree 1; #144045: small ones were zero."""

    def check(shape, precision):
        model = front.shard(KnownGradient(*shape), precision=precision)
        front.backward(model, model(torch.tensor(6.0 * (1 + world.rank), device=world.device)))
        gradient = front.full_gradients(model)["weight"].flatten()
        assert gradient.tolist() == [3.0 * (world.size + 1)] * torch.Size(shape).numel()

    precisions = [Precision(), Precision(F16), Precision(BF16, F32), Precision(reduce_dtype=F16)]
    run_subtests({"shape": [(1,), (7,), (2, 3)], "precision": precisions}, check)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.basic(2)
def test_small_parameters_in_a_group_have_their_gradients(world, front):
    """pytorch#144045: the gradient of a small parameter was zero on one rank."""

    class Uneven(nn.ModuleList):
        def forward(self, gradient):
            return torch.stack([module(gradient) for module in self]).sum()

    shapes = [(1,), (13,), (2, 3), (1, 1)]
    if not front.is_composable:  # it has no place for parameters without dimensions
        shapes += [(), (0,)]
    model = front.shard(Uneven(KnownGradient(*shape) for shape in shapes))
    front.backward(model, model(torch.tensor(2.0 * world.rank, device=world.device)))
    # One without elements lies on no rank, and has no gradient to show.
    found = {name: g for name, g in front.full_gradients(model).items() if name != "5.weight"}
    assert [g.flatten().tolist() for g in found.values()] == [
        [world.size - 1.0] * torch.Size(shape).numel() for shape in shapes if shape != (0,)
    ]


def test_fp64_gradients_are_summed_in_fp64(world, front):
    model = front.shard(KnownGradients(3).double())
    front.backward(model, model(torch.tensor(1 + world.rank * 2**-40, device=world.device, dtype=F64)))
    assert [g.tolist() for g in front.full_gradients(model).values()] == [[1 + 2**-41] * 3] * 4


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_replicas_are_bit_equal_and_runs_repeat_to_the_bit(world, engine, shard, strategy, dtype):
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(world.rank)).to(world.device, dtype)
    runs = []
    for _ in range(2):
        model = shard(KnownGradient(50).to(dtype), strategy)
        engine.backward(model, model(gradient))
        engine.optimizer(model, partial(torch.optim.SGD, lr=1.0)).step()
        runs.append(engine.full_parameters(model)["weight"])
    assert_same_across_ranks({"weight": runs[0]})
    assert torch.equal(*runs)
    assert runs[0].any()


def test_sparse_gradients_are_reduced_like_dense_ones(world, engine, shard, strategy):
    bare = nn.Embedding(3, 1, sparse=True)
    model = shard(bare, strategy, use_orig_params=True)
    engine.backward(model, model(torch.tensor([0, 1 + world.rank], device=world.device)).sum())
    assert engine.full_gradients(model)["weight"].flatten().tolist() == [1.0, 0.5, 0.5]


def test_a_hook_on_a_parameter_sees_its_reduced_gradient(world, engine, shard, run_subtests):
    """Each backward calls it once, with what has added up."""
    require(engine, Capability.WRAPPER)

    def claim(**spec):
        model, seen = shard(KnownGradient(4), **spec), []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.unique().tolist()))
        for _ in range(2):
            engine.backward(model, model(torch.tensor(1.0 + 2 * world.rank, device=world.device)))
        assert seen == [[2.0], [4.0]]

    run_subtests({"strategy": ["FULL_SHARD", "NO_SHARD"], "use_orig_params": [False, True]}, claim)


def test_what_was_frozen_as_it_was_sharded_may_be_trained_later(world, engine, shard, run_subtests):
    require(engine, Capability.WRAPPER)

    def claim(**spec):
        model = shard(KnownGradient(4).requires_grad_(False), **spec)
        for parameter in model.parameters():
            parameter.requires_grad_()
        engine.backward(model, model(torch.tensor(1.0 + world.rank, device=world.device)))
        assert engine.full_gradients(model)["weight"].tolist() == [1.5] * 4

    run_subtests({"strategy": ["FULL_SHARD", "NO_SHARD"], "use_orig_params": [False, True]}, claim)


class Withhold(torch.autograd.Function):
    """A product with a weight, which gets no gradient of it."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Withheld(nn.Module):
    """A weight that gets no gradient, and a bias in the same group that does."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return Withhold.apply(x, self.weight) + x * self.bias


@pytest.mark.ranks(2)
def test_a_function_may_withhold_a_gradient(world, front):
    model = front.shard(Withheld())
    x = torch.full((4,), 1.0 + 2 * world.rank, device=world.device)
    for number in (1, 2):
        front.backward(model, model(x).sum())
        found = front.full_gradients(model)
        assert found["bias"].tolist() == [2.0 * number] * 4
        assert found["weight"] is None or not found["weight"].any()


@pytest.fixture
def storages(monkeypatch, world):
    """Return a function: the storages of all tensors on the device that Python knows of, by address.

    Kept, it keeps them alive: no address in it is used again.
    """
    # It would fill the memory with NaN and hold it.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)

    def storages():
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        found = [each.untyped_storage() for each in tensors if each.device == world.device]
        return {storage.data_ptr(): storage for storage in found}

    return storages


@pytest.fixture
def held(storages):
    """Return a function: the bytes of storages that were not there `before`, less `known` bytes.

    A thread of the backend may hold for some time what it has sent: it has 2 s to come `below` a limit.
    """

    def held(before, known, below):
        end = time.monotonic() + 2
        while True:
            new = [storage.nbytes() for address, storage in storages().items() if address not in before]
            if (found := sum(new) - known) < below or time.monotonic() > end:
                return found
            time.sleep(0.01)

    return held


def layers(depth):
    bare = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth)))
    bare.units = tuple(map(str, range(depth)))
    return bare


FULL_LAYER = 64 * 64 * F32.itemsize
SLACK = FULL_LAYER // 16
"""What activations take at most."""


@pytest.mark.skew(seeds=[])  # under which collectives hold copies
def test_a_backward_holds_the_buffers_of_one_reduction(storages, held, world, engine, shard):
    """As a gradient arrives at the first layer, however many layers there are: their own gradients apart."""

    def buffers(depth, below):
        model, found = shard(layers(depth)), []
        before, gradients = storages(), depth * FULL_LAYER // world.size
        for _ in range(2):  # the second step has what the first one may have left
            x = torch.ones(1, 64, device=world.device, requires_grad=True)
            x.register_hook(lambda _: found.append(held(before, gradients, below)))
            engine.backward(model, model(x).sum())
            model.zero_grad()
        return found[-1]

    # The sum of gloo is made of the pieces of all ranks, which are received first.
    one = (2 if "gloo" in world.backend else 1.5) * FULL_LAYER + SLACK
    few = buffers(4, below=one)
    assert few < one
    assert buffers(8, below=few + SLACK) < few + SLACK


@pytest.mark.skew(seeds=[])  # under which collectives hold copies
def test_a_step_leaves_no_memory_but_its_gradients(storages, held, world, engine, shard):
    model = shard(layers(4))
    x = torch.ones(1, 64, device=world.device)
    before, gradients = storages(), 4 * FULL_LAYER // world.size
    for _ in range(2):
        engine.backward(model, model(x).sum())
        assert held(before, gradients, SLACK) < SLACK
        model.zero_grad()
        assert held(before, 0, SLACK) < SLACK
