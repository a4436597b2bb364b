"""Compiled code under `--skew`, which torch runs uncompiled, and after a test with the mark."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine import fully_shard

pytestmark = pytest.mark.ranks(2)


class Block(nn.Module):
    def forward(self, x):
        return x.sin() * 2


def test_sound(compiles, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for block in model:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 4) + world.rank).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_race(world):
    block = nn.Linear(4, 4, bias=False)
    full = block.weight.detach() / 2
    work = dist.all_reduce(full, async_op=True)
    block.weight.data = full
    block.compile(backend="aot_eager")
    block(torch.ones(2, 4))  # too early
    work.wait()


@pytest.mark.skew(seeds=1)
def test_marked(compiles):
    torch.compile(Block(), backend="eager")(torch.ones(2))
    assert compiles.frames == ()


def test_after_the_mark(compiles):
    torch.compile(Block(), backend="eager")(torch.ones(2))
    assert len(compiles.graphs) == 1
