"""Trainings whose result is known, as a race in the engine would change it; for `benchmarks/races.py`."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.engine import FullyShardedDataParallel, ShardedGradScaler, ShardingStrategy, always_wrap_policy

pytestmark = pytest.mark.ranks(2)
TRIES = 10
STRATEGIES = {name: ShardingStrategy[name] for name in ("FULL_SHARD", "NO_SHARD")}


def training(world, strategy):
    """Train a model in both ways: the parameters must be the same, and so must those of all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    reference = copy.deepcopy(model)
    if world.rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # rank 0 sends its own
    model = FullyShardedDataParallel(
        model, sharding_strategy=strategy, auto_wrap_policy=always_wrap_policy, sync_module_states=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=8.0, growth_interval=1000)
    everyone = torch.randn(3, 2, 8, 64)
    for number, both in enumerate(everyone):
        scaler.scale(model(both[world.rank]).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5, float("inf") if number == 1 else 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reference(both.reshape(-1, 64)).square().mean().backward()
        kind = float("inf") if number == 1 else 2.0
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, kind)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(norm.reshape(()).float(), expected)
    with FullyShardedDataParallel.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.reshape(-1), theirs.reshape(-1))
    dist.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("number", range(TRIES))
def test_undisturbed(world, strategy, number):
    training(world, STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.skew(seeds=TRIES)
def test_skewed(world, strategy):
    training(world, STRATEGIES[strategy])
