"""What the built-in engine sends, in which dtype and how often, and what the reduction makes of it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness.engine import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    always_wrap_policy,
    groups,
)
from harness.zoo import NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


class Weight(nn.Module):
    """One weight of ``size`` elements, whose gradient is what forward is given."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def wrapped(world, size, **arguments):
    return FullyShardedDataParallel(Weight(size).to(world.device), use_orig_params=True, **arguments)


def full_gradient(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return model.weight.grad.clone()


def nested(world, strategy, **arguments):
    model = NestedWrappedModule().to(world.device)
    arguments = {"auto_wrap_policy": always_wrap_policy, "use_orig_params": True} | arguments
    return FullyShardedDataParallel(model, sharding_strategy=strategy, **arguments)


def step(model, world):
    model(torch.randn(4, 8, device=world.device)).sum().backward()


@pytest.mark.parametrize(
    ("strategy", "per_group"),
    [
        (FULL, {"all_gather_into_tensor": 2, "all_to_all_single": 1}),
        (GRAD_OP, {"all_gather_into_tensor": 1, "all_to_all_single": 1}),
        (NONE, {"all_reduce": 1}),
    ],
)
def test_each_group_communicates_as_often_as_its_strategy_says(world, collectives, strategy, per_group):
    model = nested(world, strategy)
    step(model, world)
    assert len(groups(model)) == 5
    assert collectives.counts() == {op: 5 * count for op, count in per_group.items()}


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
@pytest.mark.parametrize("offload", [False, True])
def test_no_sync_reduces_nothing(world, collectives, strategy, offload):
    model = nested(world, strategy, cpu_offload=CPUOffload(offload))
    with model.no_sync():
        step(model, world)
    assert set(collectives.counts()) <= {"all_gather_into_tensor"}


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_gathers_carry_the_parameter_dtype_and_padding_is_all_they_add(world, collectives, dtype):
    model = wrapped(world, 5, mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=F32))
    model(torch.ones(5, device=world.device)).backward()
    assert collectives.dtypes("all_gather_into_tensor") == {dtype}
    assert collectives.nbytes("all_gather_into_tensor") == 2 * 3 * dtype.itemsize
    assert collectives.dtypes("all_to_all_single") == {F32}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
@pytest.mark.parametrize("dtype", [None, F16, BF16])
@pytest.mark.parametrize("size", [1, 4])
def test_gradients_are_the_mean_over_ranks(world, strategy, dtype, size):
    precision = MixedPrecision(reduce_dtype=dtype)
    model = wrapped(world, size, sharding_strategy=strategy, mixed_precision=precision)
    model(torch.full((size,), 6.0 * world.rank, device=world.device)).backward()
    assert full_gradient(model).tolist() == [3.0 * (world.size - 1)] * size


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_reduce_dtype_holds_for_every_bit(world, strategy):
    # 1 + 2^-10 is an fp16 number; the mean with 1 needs one bit more.
    precision = MixedPrecision(param_dtype=F16, reduce_dtype=F32, cast_root_forward_inputs=False)
    model = wrapped(world, 3, sharding_strategy=strategy, mixed_precision=precision)
    witness = 1 + world.rank * 2**-10
    model(torch.full((3,), witness, device=world.device, dtype=F16)).backward()
    assert full_gradient(model).tolist() == [1 + 2**-11] * 3


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_low_precision_sums_are_rounded_once(world, strategy, dtype):
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    model = wrapped(world, 50, sharding_strategy=strategy).to(dtype)
    model(gradient.to(world.device)).backward()
    exact = sum(world.gather(gradient.double())) / world.size
    assert torch.equal(full_gradient(model).cpu(), exact.float().to(dtype))


@pytest.mark.ranks(3)
def test_gloo_ranks_are_added_in_order_in_fp32(world):
    # In another order, or in fp64, the one in the middle would survive: 1e8 + 1 is no fp32 number.
    model = wrapped(world, 200_000)
    model(torch.full((200_000,), (1e8, 1.0, -1e8)[world.rank], device=world.device)).backward()
    assert not full_gradient(model).any()


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_one_hot_gradients_of_microbatches_add_up_and_do_not_leak_into_the_next_step(world, strategy):
    model = wrapped(world, 5, sharding_strategy=strategy)
    one_hot = torch.eye(5, device=world.device)
    for _ in range(2):
        with model.no_sync():
            for microbatch in one_hot[:-1]:
                model(microbatch).backward()
        model(one_hot[-1]).backward()
        assert full_gradient(model).tolist() == [1.0] * 5
        model.zero_grad()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [None, F16])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_synced_and_unsynced_backwards_accumulate_in_any_order(
    world, use_orig_params, offload, dtype, strategy
):
    model = FullyShardedDataParallel(
        Weight(3).to(world.device),
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=F32),
        use_orig_params=use_orig_params,
    )
    gradients = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=world.device) * (1 + 2 * world.rank)
    for index, gradient in enumerate(gradients):
        with nullcontext() if index in (0, 3, 4) else model.no_sync():
            model(gradient.expand(3)).backward()
    assert full_gradient(model).tolist() == [62.0] * 3


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_unsynced_gradients_are_full_and_this_ranks_own(world, use_orig_params):
    model = FullyShardedDataParallel(Weight(3).to(world.device), use_orig_params=use_orig_params)
    with model.no_sync():
        model(torch.full((3,), 1.0 + world.rank, device=world.device)).backward()
    (parameter,) = model.parameters()
    assert parameter.grad.tolist() == [1.0 + world.rank] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_unsynced_gradients_and_what_waits_behind_them(world, set_to_none):
    model = wrapped(world, 3)
    model(torch.ones(3, device=world.device)).backward()
    with model.no_sync():
        model(torch.ones(3, device=world.device)).backward()
    model.zero_grad(set_to_none)
    model(torch.full((3,), 5.0, device=world.device)).backward()
    assert full_gradient(model).tolist() == [5.0] * 3


def test_unsynced_gradients_of_a_unit_that_sits_out_the_synced_backward_are_reduced(world):
    class Halves(nn.ModuleDict):
        def forward(self, name, x):
            return self[name](x)

    halves = Halves({name: FullyShardedDataParallel(Weight(3).to(world.device)) for name in ("a", "b")})
    model = FullyShardedDataParallel(halves)
    gradient = torch.full((3,), 2.0 * world.rank, device=world.device)
    with model.no_sync():
        model("a", gradient).backward()
    model("b", gradient).backward()
    assert [group.gradient_dtype for group in groups(model)] == [F32, F32]
    assert full_gradient(model["a"]).tolist() == full_gradient(model["b"]).tolist() == [1.0] * 3


def test_sparse_gradients_are_reduced_like_dense_ones(world):
    bare = nn.Embedding(3, 1, sparse=True).to(world.device)
    model = FullyShardedDataParallel(bare, use_orig_params=True)
    model(torch.tensor([0, 1 + world.rank], device=world.device)).sum().backward()
    assert full_gradient(model).flatten().tolist() == [1.0, 0.5, 0.5]


def test_parameters_can_be_frozen_and_thawed_between_steps(world):
    model = nested(world, FULL, auto_wrap_policy=None)
    held = []
    for trainable in (False, True):
        for parameter in model.module.module[0].parameters():
            parameter.requires_grad_(trainable)
        step(model, world)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            held.append([p.grad is not None for p in model.parameters()])
        model.zero_grad()
    assert held == [[False] * 2 + [True] * 8, [True] * 10]


def test_kept_low_precision_gradients_accumulate_beside_fp32_parameters(world):
    precision = MixedPrecision(param_dtype=F16, keep_low_precision_grads=True)
    model = wrapped(world, 4, mixed_precision=precision)
    for _ in range(3):
        model(torch.ones(4, device=world.device)).backward()
    assert (model.weight.dtype, model.weight.grad.dtype) == (F32, F16)
    assert full_gradient(model).tolist() == [3.0] * 4


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_sees_every_gradient_once(world, strategy, norm_type):
    model = wrapped(world, 3, sharding_strategy=strategy)
    model(torch.tensor([3.0, 0.0, -4.0], device=world.device)).backward()
    norm = {1.0: 7.0, 2.0: 5.0, float("inf"): 4.0}[norm_type]
    assert model.clip_grad_norm_(0.5, norm_type).item() == pytest.approx(norm)
    torch.testing.assert_close(full_gradient(model).cpu(), torch.tensor([3.0, 0.0, -4.0]) * 0.5 / norm)
