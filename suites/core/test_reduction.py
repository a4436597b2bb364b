"""What the reduction makes of gradients: the exact mean over ranks, in the dtype that was asked for."""

import pytest
import torch
from torch import nn

from harness.adapters import Precision, ShardSpec
from harness.assertions import assert_same_across_ranks
from harness.zoo import KnownGradient, KnownGradients

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
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_reduce_dtype_holds_for_every_bit_of_every_gradient(
    world, engine, strategy, use_orig_params, offload
):
    """pytorch#190626: some gradients were reduced in low precision and cast afterwards."""
    precision = Precision(F16, F32, cast_root_forward_inputs=False)
    spec = {"precision": precision, "use_orig_params": use_orig_params, "offload": offload}
    model = shard(world, engine, KnownGradients(3), strategy, **spec)
    # 1 + 2^-10 is an fp16 number; the mean with 1 needs one bit more.
    witness = torch.tensor(1 + world.rank * 2**-10, device=world.device, dtype=F16)
    model(witness).backward()
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1 + 2**-11] * 3] * 4


@EVERY_STRATEGY
def test_fp64_gradients_are_summed_in_fp64(world, engine, strategy):
    model = shard(world, engine, KnownGradients(3).double(), strategy)
    model(torch.tensor(1 + world.rank * 2**-40, device=world.device, dtype=F64)).backward()
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1 + 2**-41] * 3] * 4


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_unsynced_gradients_add_up_in_the_reduce_dtype(world, engine, strategy, use_orig_params):
    precision = Precision(F16, F32, cast_root_forward_inputs=False)
    model = shard(
        world, engine, KnownGradients(3), strategy, precision=precision, use_orig_params=use_orig_params
    )
    large, small = (torch.tensor(value, device=world.device, dtype=F16) for value in (1.0, 2**-12))
    with model.no_sync():
        model(large).backward()
        model(small).backward()
    model(small).backward()
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1 + 2**-11] * 3] * 4


@pytest.mark.ranks(3, 4)
@EVERY_STRATEGY
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_low_precision_sums_are_rounded_once(world, engine, strategy, dtype):
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    model = shard(world, engine, KnownGradient(50).to(dtype), strategy)
    model(gradient.to(world.device)).backward()
    exact = sum(world.gather(gradient.double())) / world.size
    assert torch.equal(engine.full_gradients(model)["weight"].cpu(), exact.float().to(dtype))


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
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_large_fp16_gradients_do_not_overflow_in_the_sum(world, engine, strategy, offload):
    model = shard(world, engine, KnownGradient(3), strategy, precision=Precision(F16), offload=offload)
    model(torch.tensor(60000.0 + 64 * world.rank, device=world.device)).backward()
    assert engine.full_gradients(model)["weight"].tolist() == [60032.0] * 3


@EVERY_STRATEGY
def test_sparse_gradients_are_reduced_like_dense_ones(world, engine, strategy):
    bare = nn.Embedding(3, 1, sparse=True)
    model = shard(world, engine, bare, strategy, use_orig_params=True)
    model(torch.tensor([0, 1 + world.rank], device=world.device)).sum().backward()
    assert engine.full_gradients(model)["weight"].flatten().tolist() == [1.0, 0.5, 0.5]


@EVERY_STRATEGY
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_stored_in_the_parameters_dtype_unless_told(world, engine, strategy, keep):
    precision = Precision(F16, keep_low_precision_grads=keep)
    model = shard(world, engine, KnownGradient(4), strategy, precision=precision, use_orig_params=True)
    for _ in range(3):
        model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
    (parameter,) = model.parameters()
    assert (parameter.dtype, parameter.grad.dtype) == (F32, F16 if keep else F32)
    assert engine.full_gradients(model)["weight"].tolist() == [3.0] * 4
