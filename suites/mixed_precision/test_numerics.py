"""Reductions, to the bit: gradients are cast, summed in fp32 in rank order, divided, and rounded once.

Values are such that a sum in low precision, another order or an early division gives other bits.
"""

import pytest
import torch

from lockstep.assertions import TOLERANCES, assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Precision
from lockstep.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2, 4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LOW_DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])


def offloads(world, front):
    """Return the setting that numbers must not depend on; on many ranks not all of it."""
    return {"offload": [False, True] if world.size == 2 and not front.is_composable else [False]}


def full_gradients(front, model):
    return [gradient.tolist() for gradient in front.full_gradients(model).values()]


# low precision on the wire


def witnesses(size, dtype):
    """Return the gradients of all ranks, one row for each, in fp32 and not yet rounded to `dtype`."""
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


def mean(gradients, dtype, replicas):
    """Return the mean over rows, of ranks that share a replica and then of replicas, each rounded once."""
    size = len(gradients)
    inside = size // replicas if size > replicas else size
    sums = [rounded_sum(rows, size, dtype) for rows in gradients.to(dtype).split(inside)]
    return rounded_sum(sums, 1, dtype) if len(sums) > 1 else sums[0]


def rounded_sum(rows, divisor, dtype):
    total = torch.zeros_like(rows[0], dtype=F32)
    for row in rows:
        total += row.float()
    return (total / divisor).to(dtype)


@pytest.fixture
def check_bits(world, run_subtests):
    """Hold gradients to `mean` of the witnesses, whatever brings them into low precision."""

    def check(front, dtype, replicas, precision, **settings):
        gradients = witnesses(world.size, dtype)
        # Without any precision the model is in low precision.
        bare = KnownGradient(gradients.shape[1]).to(dtype if precision == Precision() else F32)
        axes = {"replicate": replicas, "shard": world.size // replicas}
        mesh = world.mesh(*axes.values(), names=tuple(axes)) if replicas > 1 else None
        model = front.shard(bare, precision=precision, mesh=mesh, **settings)
        front.backward(model, model(gradients[world.rank].to(world.device)))
        is_low = precision == Precision() or precision.keep_low_precision_grads
        seen = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert seen == {dtype if is_low else F32}
        expected = mean(gradients, dtype, replicas).to(world.device, *seen)
        # The order and the precision of sums are nccl's.
        tolerance = TOLERANCES[dtype] if world.backend == "nccl" else EXACT
        assert_named_close(front.full_gradients(model), {"weight": expected}, tolerance)

    def run(front, dtype, replicas=1, **settings):
        precisions = [Precision(), Precision(reduce_dtype=dtype), Precision(dtype)]
        if not front.is_composable:
            precisions.append(Precision(dtype, keep_low_precision_grads=True))
        settings = {"precision": precisions, **settings, **offloads(world, front)}
        run_subtests(settings, check, front, dtype, replicas)

    return run


@pytest.mark.ranks(2, 3, 4)
@LOW_DTYPES
def test_low_precision_gradients_are_summed_in_fp32_by_rank(front, check_bits, dtype):
    check_bits(front, dtype)


@LOW_DTYPES
def test_hybrid_reductions_round_once_inside_and_once_across(check_bits, hybrid_front, dtype):
    own = {} if hybrid_front.is_composable else {"use_orig_params": [False, True]}
    check_bits(hybrid_front, dtype, replicas=2, **own)


@LOW_DTYPES
def test_small_terms_count_together(world, engine, shard, strategy, dtype):
    """The same in numbers: added one by one in low precision, three quarters of a bit leave 1 as it is."""
    eps = torch.finfo(dtype).eps
    model = shard(KnownGradient(3), strategy, precision=Precision(dtype))
    engine.backward(model, model(torch.tensor(1.0 if world.rank == 0 else eps / 4, device=world.device)))
    expected = {2: 1 / 2, 4: (1 + eps) / 4}[world.size]
    assert full_gradients(engine, model) == [[expected] * 3]


@pytest.mark.parametrize("precision", [Precision(F16), Precision(reduce_dtype=F16)], ids=["param", "reduce"])
def test_the_mean_of_fp16_gradients_is_exact_if_sums_overflow(world, front, precision):
    model = front.shard(KnownGradient(3), precision=precision)
    front.backward(model, model(torch.tensor(60000.0 + 64 * world.rank, device=world.device)))
    assert full_gradients(front, model) == [[60000.0 + 32 * (world.size - 1)] * 3]


# fp32 on the wire


@LOW_DTYPES
@pytest.mark.basic(7)
def test_reduce_dtype_holds_for_every_bit_of_every_gradient(world, front, run_subtests, dtype):
    """pytorch#190626: some gradients were reduced in low precision and cast afterwards."""
    eps = torch.finfo(dtype).eps

    def check(keep, **settings):
        precision = Precision(dtype, F32, keep_low_precision_grads=keep)
        model = front.shard(KnownGradients(4), precision=precision, **settings)
        # The last rank has one bit more than 1, the last of the dtype; the mean needs more.
        witness = 1 + eps * (world.rank == world.size - 1)
        front.backward(model, model(torch.tensor(witness, device=world.device)))
        assert full_gradients(front, model) == [[1 + eps / world.size] * 4] * 4
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}

    keep = [False] if front.is_composable else [False, True]
    run_subtests({"keep": keep, **offloads(world, front)}, check)


@LOW_DTYPES
def test_low_precision_models_round_gradients_after_the_sum(world, engine, shard, strategy, dtype):
    eps = torch.finfo(dtype).eps
    model = shard(KnownGradient(4).to(dtype), strategy, precision=Precision(F32))
    # Rounded before they are summed, they would be 1 and 1 + eps, and their mean would be rounded to 1.
    witness = 1 + eps * (0.4, 0.8)[world.rank % 2]
    engine.backward(model, model(torch.tensor(witness, device=world.device)))
    assert full_gradients(engine, model) == [[1 + eps] * 4]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


@LOW_DTYPES
def test_unsynced_gradients_add_up_in_the_reduce_dtype(world, front, run_subtests, dtype):
    eps = torch.finfo(dtype).eps

    def check(**settings):
        model = front.shard(KnownGradients(3), precision=Precision(dtype, F32), **settings)
        large, small = (torch.tensor(value, device=world.device) for value in (1.0, eps / 4))
        with front.no_sync(model):
            front.backward(model, model(large))
            front.backward(model, model(small))
        front.backward(model, model(small))
        assert full_gradients(front, model) == [[1 + eps / 2] * 3] * 4

    run_subtests(offloads(world, front), check)
