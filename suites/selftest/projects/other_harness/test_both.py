"""Tests on ranks in a project that has a package `harness` of its own."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness.plugin
import lockstep.shm
from lockstep import RankWorld
from lockstep.assertions import assert_equal
from lockstep.engine import FullyShardedDataParallel

pytestmark = pytest.mark.ranks(2)


def test_both_are_imported(world):
    assert harness.THEIRS == harness.plugin.THEIRS == "theirs"
    assert isinstance(world, RankWorld)
    assert {"harness", "harness.plugin"} == {name for name in sys.modules if name.startswith("harness")}


def test_engine(world):
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert_equal([group.state.name for group in lockstep.engine.groups(model)], ["SHARDED"])


@pytest.mark.ranks(2, backend="shm")
def test_shm(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert (total.item(), dist.get_backend()) == (2, lockstep.shm.__name__.split(".")[1])


def test_fails(world):
    assert world.rank == 0


def test_leaves_a_variable(world, monkeypatch):
    import os

    os.environ["LEFT_BEHIND"] = "1"
