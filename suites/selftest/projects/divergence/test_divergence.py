"""Trainings that part: from a reference, and from other ranks."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from engine import Engine
from notes import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import (
    Trainee,
    Training,
    assert_parity,
    assert_same_across_ranks,
    named_gradients,
    named_parameters,
    per_rank_batches,
    train,
)

pytestmark = pytest.mark.ranks(2)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def squared(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def training(world):
    return Training(
        per_rank_batches(lambda g: torch.randn(5, 4, generator=g), 0, world.rank), squared, steps=2
    )


def ddp():
    return Trainee(DistributedDataParallel(make_layers()), full_gradients=named_gradients)


def sharded(fault=""):
    return Trainee(
        Engine(make_layers(), fault),
        lambda engine: engine.full_parameters(),
        lambda engine: engine.full_gradients(),
    )


def test_sound_engine(world, training):
    note(world, "sound")
    assert_parity(ddp(), sharded(), training)


def test_wrong_wait(world, training):
    candidate = sharded("wait")
    last = candidate.model.units["2"]
    read = world.shared_tmp_path / "read"
    if world.rank == 1:  # so that rank 0 always comes too early
        begin = last.begin_gather

        def begin_late():
            deadline = time.monotonic() + 30
            while not read.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            begin()

        last.begin_gather = begin_late
    else:
        last.layer.register_forward_hook(lambda *_: read.touch())
    assert_parity(ddp(), candidate, training)


def test_one_case(world, training, run_subtests):
    learned = train(ddp(), training)

    def claim(fault):
        note(world, f"case-{fault}")
        assert_parity(learned, sharded(fault), training)

    run_subtests({"fault": ["none", "cast", "other"]}, claim)


def test_not_every_time(world, training):
    note(world, "once")
    first = world.shared_tmp_path.parent / f"ran-{world.rank}"
    is_first = not first.exists()
    first.touch()
    assert_parity(ddp(), sharded("cast" if is_first else ""), training)


def test_another_way(world, training):
    first = world.shared_tmp_path.parent / f"ran-once-{world.rank}"
    if first.exists():
        raise ValueError("not a second time\nat all")
    first.touch()
    assert_parity(ddp(), sharded("cast"), training)


def test_one_element(world):
    """Its gradient is a view of one number, whose strides are 0."""
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4) + world.rank).sum().backward()
    sgd.step()
    assert_same_across_ranks(dict(model.named_parameters()))


def test_unreduced_gradient(world):
    torch.manual_seed(0)
    model = make_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        squared(model, torch.randn(5, 4) + world.rank).backward()
        for name, parameter in model.named_parameters():
            if name != "2.bias":
                dist.all_reduce(parameter.grad)
        optimizer.step()
    assert_same_across_ranks(dict(model.named_parameters()))


def test_different_weights(world):
    model = make_layers()
    if world.rank == 1:
        with torch.no_grad():
            model[0].bias += 1
    squared(model, torch.ones(5, 4)).backward()
    assert_same_across_ranks(dict(model.named_parameters()))


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


class WrongLinear(nn.Linear):
    def forward(self, x):
        return Wrong.apply(super().forward(x))


class Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def wrong_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), WrongLinear(3, 2))


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def test_autocast(world, training):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=hasattr(model, "casts")):
            return squared(model, batch)

    candidate = ddp()
    candidate.model.casts = True
    training = dataclasses.replace(training, loss=loss, tolerance=torch.float32)
    assert_parity(ddp(), candidate, training)


def test_scaled(world, training):
    candidate = Trainee(
        DistributedDataParallel(wrong_layers()), full_gradients=named_gradients, scaler=scaler()
    )
    assert_parity(ddp(), candidate, training)


def test_checkpointed(world, training):
    def unprefixed(named):
        return lambda model: {name.removeprefix("layers."): each for name, each in named(model).items()}

    model = DistributedDataParallel(Checkpointed(wrong_layers()))
    candidate = Trainee(model, unprefixed(named_parameters), unprefixed(named_gradients))
    assert_parity(ddp(), candidate, training)


@pytest.mark.ranks(3)
def test_subgroup(world):
    group = dist.new_group([0, 2])
    if world.rank != 1:
        model = make_layers()
        descent = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            descent.zero_grad()
            squared(model, torch.ones(5, 4) * (world.rank + step)).backward()
            for name, parameter in model.named_parameters():
                if name != "2.bias" or step == 0:
                    dist.all_reduce(parameter.grad, group=group)
            descent.step()
        assert_same_across_ranks(dict(model.named_parameters()), group)
