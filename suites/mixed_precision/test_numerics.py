"""Reductions to the bit: gradients are cast, summed in fp32 in rank order, divided, and rounded once.

Values are such that a sum in low precision, another order or an early division gives other bits.
"""

import pytest
import torch

from harness.assertions import TOLERANCES, assert_named_close
from harness.assertions.closeness import EXACT
from harness.conformance import Precision, ShardSpec
from harness.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2, 4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
LOW_DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])


def options(world):
    """Return the settings that numbers must not depend on; on many ranks not all of them."""
    return {"use_orig_params": [False, True], "offload": [False, True] if world.size == 2 else [False]}


def num_shards(world, strategy):
    """Return over how many ranks parameters are cut; hybrid strategies replicate that twice."""
    return {"NO_SHARD": 1, **dict.fromkeys(HYBRID, world.size // 2)}.get(strategy, world.size)


def shard(world, engine, bare, strategy, **more):
    units = getattr(bare, "units", ())
    return engine.shard(bare.to(world.device), ShardSpec(strategy, units=units, device=world.device, **more))


def full_gradients(engine, model):
    return [gradient.tolist() for gradient in engine.full_gradients(model).values()]


# low precision on the wire


def witnesses(size, dtype):
    """Return the gradients of all ranks, one row for each, in fp32 and not yet rounded to ``dtype``."""
    limits, others = torch.finfo(dtype), size - 1
    columns = [
        [1.0] + [limits.eps / 4] * others,  # small terms vanish one by one, not together
        [limits.eps / 4] * others + [1.0],
        [1.0] + [1 + limits.eps] * others,
        [60000.0] * size,  # the sum of fp16 numbers overflows, their mean does not
        [limits.smallest_normal * limits.eps] * size,  # the smallest number there is: half of it is zero
        [2.0**15, 2.0**-10, -(2.0**15), 2.0**-10][:size],  # not even fp32 holds the sum: its order shows
        [2.0**-10, 2.0**15, -(2.0**15), 1.0][:size],
    ]
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(size, 40, generator=generator)
    scales = 2.0 ** torch.randint(-8, 8, (size, 40), generator=generator)
    return torch.cat([torch.tensor(columns).T, random * scales], dim=1)


def mean(gradients, dtype, shards):
    """Return the mean over rows, of ranks that share a replica and then of replicas, each rounded once."""
    size = len(gradients)
    inside = shards if 1 < shards < size else size
    replicas = [rounded_sum(rows, size, dtype) for rows in gradients.to(dtype).split(inside)]
    return rounded_sum(replicas, 1, dtype) if len(replicas) > 1 else replicas[0]


def rounded_sum(rows, divisor, dtype):
    total = torch.zeros_like(rows[0], dtype=F32)
    for row in rows:
        total += row.float()
    return (total / divisor).to(dtype)


@pytest.fixture
def check_bits(world, engine, run_subtests):
    """Hold gradients to `mean` of the witnesses, whatever brings them into low precision."""

    def check(precision, strategy, dtype, groups, **settings):
        gradients = witnesses(world.size, dtype)
        # Without any precision it is the model itself that is in low precision.
        bare = KnownGradient(gradients.shape[1]).to(dtype if precision == Precision() else F32)
        spec = {"precision": precision, "process_group": groups(), **settings}
        model = shard(world, engine, bare, strategy, **spec)
        model(gradients[world.rank].to(world.device)).backward()
        is_low = precision == Precision() or precision.keep_low_precision_grads
        seen = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert seen == {dtype if is_low else F32}
        expected = mean(gradients, dtype, num_shards(world, strategy)).to(world.device, *seen)
        # nccl adds in an order and a precision of its own.
        tolerance = TOLERANCES[dtype] if world.backend == "nccl" else EXACT
        assert_named_close(engine.full_gradients(model), {"weight": expected}, tolerance)

    def run(strategy, dtype, groups=lambda: None):
        low = Precision(dtype)
        kept = Precision(dtype, keep_low_precision_grads=True)
        settings = {"precision": [Precision(), Precision(reduce_dtype=dtype), low, kept], **options(world)}
        run_subtests(settings, check, strategy=strategy, dtype=dtype, groups=groups)

    return run


@pytest.mark.ranks(2, 3, 4)
@EVERY_STRATEGY
@LOW_DTYPES
def test_low_precision_gradients_are_summed_in_fp32_in_rank_order_and_rounded_once(
    check_bits, strategy, dtype
):
    check_bits(strategy, dtype)


@pytest.mark.parametrize("strategy", HYBRID)
@LOW_DTYPES
def test_hybrid_reductions_round_once_inside_a_replica_and_once_across(world, check_bits, strategy, dtype):
    def axes():
        mesh = world.mesh(2, world.size // 2)
        return mesh.get_group(1), mesh.get_group(0)

    check_bits(strategy, dtype, axes)


@EVERY_STRATEGY
@LOW_DTYPES
def test_small_terms_count_together(world, engine, strategy, dtype):
    """The same in numbers: added one by one in low precision, three quarters of a bit leave 1 as it is."""
    eps = torch.finfo(dtype).eps
    model = shard(world, engine, KnownGradient(3), strategy, precision=Precision(dtype))
    model(torch.tensor(1.0 if world.rank == 0 else eps / 4, device=world.device)).backward()
    expected = {2: 1 / 2, 4: (1 + eps) / 4}[world.size]
    assert full_gradients(engine, model) == [[expected] * 3]


@EVERY_STRATEGY
@pytest.mark.parametrize("precision", [Precision(F16), Precision(reduce_dtype=F16)], ids=["param", "reduce"])
def test_the_mean_of_fp16_gradients_whose_sum_overflows_is_exact(world, engine, strategy, precision):
    model = shard(world, engine, KnownGradient(3), strategy, precision=precision)
    model(torch.tensor(60000.0 + 64 * world.rank, device=world.device)).backward()
    assert full_gradients(engine, model) == [[60000.0 + 32 * (world.size - 1)] * 3]


# fp32 on the wire


@EVERY_STRATEGY
@LOW_DTYPES
def test_reduce_dtype_holds_for_every_bit_of_every_gradient(world, engine, run_subtests, strategy, dtype):
    """pytorch#190626: some gradients were reduced in low precision and cast afterwards."""
    eps = torch.finfo(dtype).eps

    def check(keep, **settings):
        precision = Precision(dtype, F32, keep_low_precision_grads=keep)
        model = shard(world, engine, KnownGradients(4), strategy, precision=precision, **settings)
        # The last rank has one bit more than 1, the last of the dtype; the mean needs more.
        witness = 1 + eps * (world.rank == world.size - 1)
        model(torch.tensor(witness, device=world.device)).backward()
        assert full_gradients(engine, model) == [[1 + eps / world.size] * 4] * 4
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}

    run_subtests({"keep": [False, True], **options(world)}, check)


@EVERY_STRATEGY
@LOW_DTYPES
def test_gradients_of_a_low_precision_model_are_rounded_after_the_fp32_sum(world, engine, strategy, dtype):
    eps = torch.finfo(dtype).eps
    model = shard(world, engine, KnownGradient(4).to(dtype), strategy, precision=Precision(F32))
    # Rounded before they are summed, they would be 1 and 1 + eps, and their mean would be rounded to 1.
    witness = 1 + eps * (0.4, 0.8)[world.rank % 2]
    model(torch.tensor(witness, device=world.device)).backward()
    assert full_gradients(engine, model) == [[1 + eps] * 4]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


@EVERY_STRATEGY
@LOW_DTYPES
def test_unsynced_gradients_add_up_in_the_reduce_dtype(world, engine, run_subtests, strategy, dtype):
    eps = torch.finfo(dtype).eps

    def check(**settings):
        model = shard(world, engine, KnownGradients(3), strategy, precision=Precision(dtype, F32), **settings)
        large, small = (torch.tensor(value, device=world.device) for value in (1.0, eps / 4))
        with engine.no_sync(model):
            model(large).backward()
            model(small).backward()
        model(small).backward()
        assert full_gradients(engine, model) == [[1 + eps / 2] * 3] * 4

    run_subtests(options(world), check)
