"""Every reduce operation in every dtype, and the bits of sums."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engine import collectives
from lockstep.engine.mesh import Axis, MeshInfo
from suites.selftest.shm.samples import INTEGERS, LOW, REAL, same, sample

pytestmark = [
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated.*:FutureWarning"),
]

SUM, AVG, PRODUCT, MIN, MAX = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
)
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR

ARITHMETIC = {
    "SUM": (SUM, lambda a, b: a + b),
    "PRODUCT": (PRODUCT, lambda a, b: a * b),
    "MIN": (MIN, torch.minimum),
    "MAX": (MAX, torch.maximum),
}
BITWISE = {
    "BAND": (BAND, torch.bitwise_and),
    "BOR": (BOR, torch.bitwise_or),
    "BXOR": (BXOR, torch.bitwise_xor),
}

NUMBERS = (*LOW, *REAL, *INTEGERS)
WHOLE = (*INTEGERS, torch.int16)


def names(dtypes):
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def check(world, group, op, expected: Tensor, dtype: torch.dtype) -> None:
    """Run each collective that reduces; all ranks have `expected`, of two samples of six."""
    mine = sample(world.rank, dtype)
    dist.all_reduce(everywhere := mine.clone(), op, group=group)
    assert same(everywhere, expected)
    dist.reduce(at_root := mine.clone(), 1, op, group=group)
    assert world.rank == 0 or same(at_root, expected)
    dist.reduce_scatter_tensor(scattered := torch.empty(3, dtype=dtype), mine, op, group=group)
    assert same(scattered, expected.view(2, 3)[world.rank])
    dist.reduce_scatter(listed := torch.empty(3, dtype=dtype), list(mine.split(3)), op, group=group)
    assert same(listed, scattered)


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("dtype", NUMBERS, ids=names(NUMBERS))
@pytest.mark.ranks(2)
def test_arithmetic_reductions(world, group, dtype, op):
    code, combine = ARITHMETIC[op]
    check(world, group, code, combine(sample(0, dtype), sample(1, dtype)), dtype)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.ranks(2)
def test_reductions_of_int16(world, group, op):
    code, combine = ARITHMETIC[op]
    check(world, group, code, combine(sample(0, torch.int16), sample(1, torch.int16)), torch.int16)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("op", BITWISE)
@pytest.mark.parametrize("dtype", WHOLE, ids=names(WHOLE))
@pytest.mark.ranks(2)
def test_bitwise_reductions(world, group, dtype, op):
    code, combine = BITWISE[op]
    check(world, group, code, combine(sample(0, dtype), sample(1, dtype)), dtype)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("dtype", [*LOW, *REAL], ids=names([*LOW, *REAL]))
@pytest.mark.ranks(2)
def test_avg_is_the_sum_divided_once(world, group, dtype):
    check(world, group, AVG, (sample(0, dtype).double() + sample(1, dtype)).div(2).to(dtype), dtype)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(2)
def test_the_mean_of_integers_is_rounded_towards_zero(world, group):
    dist.all_reduce(tensor := torch.tensor([3 + world.rank, -3 - world.rank]), AVG, group=group)
    assert tensor.tolist() == [3, -3]


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("dtype", [*LOW, *REAL], ids=names([*LOW, *REAL]))
@pytest.mark.ranks(2)
def test_premul_sum_scales_before_the_sum(world, group, dtype):
    op = dist._make_nccl_premul_sum(0.5)
    check(world, group, op, (sample(0, dtype) * 0.5 + sample(1, dtype) * 0.5).to(dtype), dtype)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(2)
def test_premul_sum_may_have_another_factor_on_each_rank(world, group):
    dist.all_reduce(tensor := torch.ones(2), dist._make_nccl_premul_sum(world.rank + 2.0), group=group)
    assert tensor.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(2)
def test_premul_sum_by_a_tensor(world, group):
    factor = torch.tensor([2.0])
    dist.all_reduce(tensor := torch.ones(2), dist._make_nccl_premul_sum(factor), group=group)
    assert tensor.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(2)
def test_premul_sum_by_a_tensor_of_a_wider_dtype(world, group):
    op = dist._make_nccl_premul_sum(torch.tensor([2.0]))
    whole, piece = torch.arange(20_000.0).bfloat16(), torch.empty(10_000, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(piece, whole, op, group=group)
    assert same(piece, (whole * 4).view(2, -1)[world.rank])


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN", "PRODUCT", "BOR", "BAND", "BXOR"])
@pytest.mark.ranks(2)
def test_reductions_of_bool_are_logical(world, group, op):
    combine = {
        **dict.fromkeys(["SUM", "MAX", "BOR"], torch.logical_or),
        **dict.fromkeys(["PRODUCT", "MIN", "BAND"], torch.logical_and),
        "BXOR": torch.logical_xor,
    }[op]
    both = [torch.tensor([True, True, False, False, True, False]), torch.tensor([True, False] * 3)]
    dist.all_reduce(tensor := both[world.rank].clone(), getattr(dist.ReduceOp, op), group=group)
    assert same(tensor, combine(*both))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["complex64", "complex128"])
@pytest.mark.ranks(2)
def test_the_sum_of_complex_numbers(world, group, dtype):
    dist.all_reduce(tensor := sample(world.rank, dtype), group=group)
    assert same(tensor, sample(0, dtype) + sample(1, dtype))


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.ranks(2)
def test_a_nan_of_one_rank_makes_the_extreme_nan(world, group, op):
    tensor = torch.tensor([math.nan, 1.0]) if world.rank == 0 else torch.tensor([1.0, math.nan])
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
    assert tensor.isnan().all()


# bits

SIZES = (1, 7, 4096, 70_001)


def random(rank: int, dtype: torch.dtype, numel: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(numel, generator=generator) * 10 ** (turn % 3)).to(dtype)


def in_rank_order(pieces: list[Tensor], divisor: float | None = None) -> Tensor:
    dtype = pieces[0].dtype
    total = pieces[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for piece in pieces[1:]:
        total += piece
    return (total if divisor is None else total.div_(divisor)).to(dtype)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("dtype", [*LOW, *REAL], ids=names([*LOW, *REAL]))
@pytest.mark.ranks(2, 3, 4)
def test_sums_are_rounded_once_and_in_rank_order(world, group, dtype):
    for turn, numel in enumerate(SIZES):
        padded = -(-numel // world.size) * world.size
        parts = [random(rank, dtype, padded, turn) for rank in range(world.size)]
        expected = in_rank_order(parts)
        dist.all_reduce(everywhere := parts[world.rank].clone(), group=group)
        assert same(everywhere, expected), numel
        scattered = torch.empty(padded // world.size, dtype=dtype)
        dist.reduce_scatter_tensor(scattered, parts[world.rank], group=group)
        assert same(scattered, expected.view(world.size, -1)[world.rank]), numel
        dist.reduce(at_root := parts[world.rank].clone(), 0, group=group)
        assert world.rank != 0 or same(at_root, expected), numel
        dist.all_reduce(mean := parts[world.rank].clone(), AVG, group=group)
        assert same(mean, in_rank_order(parts, world.size)), numel


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("dtype", [*LOW, *REAL], ids=names([*LOW, *REAL]))
@pytest.mark.ranks(2, 4)
def test_a_reduce_scatter_has_the_bits_of_the_engine_on_gloo(world, group, dtype):
    gloo = dist.new_group(backend="gloo")
    mesh = MeshInfo(Axis.of(gloo), None)
    for turn, numel in enumerate(SIZES):
        full = random(world.rank, dtype, numel * world.size, turn)
        scattered = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(scattered, full, AVG, group=group)
        engine = collectives.start_mean(full.clone(), mesh, dtype, collectives.BufferPool())()
        assert same(scattered, engine), numel
    dist.destroy_process_group(gloo)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("dtype", LOW, ids=names(LOW))
@pytest.mark.ranks(2, 3)
def test_an_all_reduce_has_the_bits_of_the_engine_on_gloo(world, group, dtype):
    gloo = dist.new_group(backend="gloo")
    mesh = MeshInfo(None, Axis.of(gloo))
    for turn, numel in enumerate(SIZES):
        full = random(world.rank, dtype, numel, turn)
        dist.all_reduce(mean := full.clone(), AVG, group=group)
        engine = collectives.start_mean(full.clone(), mesh, dtype, collectives.BufferPool())()
        assert same(mean, engine), numel
    dist.destroy_process_group(gloo)


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(3)
def test_coalesced_sums_have_the_bits_of_single_ones(world, group):
    tensors = [random(world.rank, torch.bfloat16, numel, 0) for numel in SIZES]
    single = [tensor.clone() for tensor in tensors]
    for tensor in single:
        dist.all_reduce(tensor, group=group)
    dist.all_reduce_coalesced(tensors, group=group)
    assert all(map(same, tensors, single))
