"""What the reduction makes of gradients: the exact mean over ranks, in the dtype that was asked for."""

import pytest
import torch
from torch import nn

from harness.assertions import assert_same_across_ranks
from harness.conformance import Precision, ShardSpec
from harness.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


def shard(world, engine, bare, strategy, **more):
    units = getattr(bare, "units", ())
    return engine.shard(bare.to(world.device), ShardSpec(strategy, units=units, device=world.device, **more))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(1,), (7,)], ids=str)
def test_gradients_are_the_mean_over_ranks(world, engine, run_subtests, shape):
    """pytorch#162338: gloo gave the sum; #167178: no division at degree 1; #144045: small ones were zero."""
    settings = {
        "strategy": STRATEGIES,
        "use_orig_params": [False, True],
        "precision": [Precision(), Precision(F16), Precision(BF16, F32), Precision(reduce_dtype=F16)],
    }
    run_subtests(settings, check_mean, world, engine, shape=shape)


def check_mean(world, engine, shape, strategy, **more):
    model = shard(world, engine, KnownGradient(*shape), strategy, **more)
    model(torch.tensor(6.0 * (1 + world.rank), device=world.device)).backward()
    gradients = engine.full_gradients(model)
    assert gradients["weight"].flatten().tolist() == [3.0 * (world.size + 1)] * torch.Size(shape).numel()


@pytest.mark.ranks(1, 2, 3, 4)
@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_element_beside_a_large_parameter_has_its_gradient(world, engine, strategy, use_orig_params):
    """pytorch#144045: the gradient of a small parameter was zero on one rank."""

    class Uneven(nn.ModuleList):
        def forward(self, gradient):
            return torch.stack([module(gradient) for module in self]).sum()

    bare = Uneven(KnownGradient(*shape) for shape in [(1,), (13,), (), (0,), (2, 3), (1, 1)])
    model = shard(world, engine, bare, strategy, use_orig_params=use_orig_params)
    model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
    found = {name: g for name, g in engine.full_gradients(model).items() if name != "3.weight"}
    assert [g.flatten().tolist() for g in found.values()] == [
        [world.size - 1.0] * n for n in (1, 13, 1, 6, 1)
    ]


@EVERY_STRATEGY
def test_fp64_gradients_are_summed_in_fp64(world, engine, strategy):
    model = shard(world, engine, KnownGradients(3).double(), strategy)
    model(torch.tensor(1 + world.rank * 2**-40, device=world.device, dtype=F64)).backward()
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1 + 2**-41] * 3] * 4


@pytest.mark.ranks(3, 4)
@EVERY_STRATEGY
@pytest.mark.parametrize("dtype", [F16, F32])
def test_replicas_are_bit_equal_and_a_second_run_gives_the_same_bits(world, engine, strategy, dtype):
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(world.rank)).to(world.device, dtype)
    runs = []
    for _ in range(2):
        model = shard(world, engine, KnownGradient(50).to(dtype), strategy)
        model(gradient).backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad)
        runs.append(engine.full_parameters(model)["weight"])
    assert_same_across_ranks({"weight": runs[0]})
    assert torch.equal(*runs)
    assert runs[0].any()


@EVERY_STRATEGY
def test_sparse_gradients_are_reduced_like_dense_ones(world, engine, strategy):
    bare = nn.Embedding(3, 1, sparse=True)
    model = shard(world, engine, bare, strategy, use_orig_params=True)
    model(torch.tensor([0, 1 + world.rank], device=world.device)).sum().backward()
    assert engine.full_gradients(model)["weight"].flatten().tolist() == [1.0, 0.5, 0.5]
