"""The engine on shared memory: the bits of gloo, memory that peers read in place, and what is given back."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
)
from lockstep.engine.collectives import BufferPool
from lockstep.engine.mesh import Axis

pytestmark = pytest.mark.ranks(2, backend="shm")


class Layer(nn.Module):
    """A unit of sizes that no number of ranks divides, with a parameter that a rank may not use."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.rare = nn.Linear(inputs, outputs), nn.Parameter(torch.ones(outputs))

    def forward(self, x, uses_rare):
        x = self.linear(x)
        return x * self.rare if uses_rare else x


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(5, 7), Layer(7, 301), Layer(301, 3)])

    def forward(self, x, uses_rare):
        for layer in self.layers:
            x = layer(x, uses_rare)
        return x


def wrapped(group, low, strategy):
    return FullyShardedDataParallel(
        Layers(),
        process_group=group,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=low),
        use_orig_params=True,
    )


def composed(group, low, divisor):
    model, mesh = Layers(), DeviceMesh.from_group(group, "cpu")
    for one in (*model.layers, model):
        fully_shard(one, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
        if divisor:
            one.set_gradient_divide_factor(divisor)
    return model


def trained(model, world, dtype):
    """Return the local parts of parameters and gradients after each of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(world.rank)
    seen = []
    for step in range(3):
        # Gradients of many magnitudes, so that the order of additions and the rounding show.
        x = torch.randn(4, 5, generator=generator) * 10.0 ** (world.rank - 1)
        model(x.to(dtype or torch.float32), uses_rare=step > 0 and world.rank == 0).float().sum().backward()
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad):
                local = getattr(tensor, "_local_tensor", tensor)
                seen.append(None if local is None else local.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same_bits(here, there):
    assert len(here) == len(there) > 0
    for one, other in zip(here, there, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.fixture
def gloo(world):
    group = dist.new_group(backend="gloo")
    yield group
    dist.barrier(group)  # a rank that is done would close connections that others are making
    dist.destroy_process_group(group)


DTYPES = {"dtype": [None, torch.bfloat16, torch.float16]}


@pytest.mark.ranks(3, backend="shm")
def test_the_wrapper_trains_with_the_bits_of_gloo(world, gloo, run_subtests):
    def claim(dtype, strategy):
        both = (wrapped(group, dtype, strategy) for group in (dist.group.WORLD, gloo))
        assert_same_bits(*(trained(model, world, dtype) for model in both))

    strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    run_subtests({**DTYPES, "strategy": strategies}, claim)


@pytest.mark.ranks(3, backend="shm")
def test_fully_shard_trains_with_the_bits_of_gloo(world, gloo, run_subtests):
    def claim(dtype, divisor):
        both = (composed(group, dtype, divisor) for group in (dist.group.WORLD, gloo))
        assert_same_bits(*(trained(model, world, dtype) for model in both))

    run_subtests({**DTYPES, "divisor": [None, 5.0]}, claim)


def test_a_buffer_to_send_is_memory_that_peers_read(world):
    axis = Axis.of(dist.group.WORLD)
    buffer = BufferPool().take(6, torch.float32, torch.device("cpu"), axis)
    buffer.copy_(torch.arange(6.0) + world.rank)
    seen = []
    axis.in_place.reduce_scatter_views(buffer, lambda parts: seen.extend(p.tolist() for p in parts)).wait()
    start = 3 * world.rank
    assert seen == [[start + i + rank for i in range(3)] for rank in range(2)]


def test_a_group_of_gloo_offers_no_memory(world, gloo):
    assert Axis.of(gloo).in_place is None


def test_memory_of_a_step_is_used_again_in_the_next(world):
    """A leak grows with each step; how many buffers are used at a time depends on how far ranks are apart."""
    model = wrapped(dist.group.WORLD, torch.bfloat16, ShardingStrategy.FULL_SHARD)
    group, sizes = dist.group.WORLD, []
    for _ in range(10):
        trained(model, world, torch.bfloat16)
        gc.collect()
        dist.barrier()
        sizes.append(group._channel.arena.nbytes)
    assert len(set(sizes)) <= 4
