"""Trainings whose result is known, as a race in the engine would change it; for `benchmarks/races.py`."""

import time

import pytest
import torch
from torch import nn

from lockstep.conformance import Precision, ShardSpec
from lockstep.conformance.registry import find

pytestmark = pytest.mark.ranks(2)
TRIES = 20
WIDTH, BATCH = 64, 32
PAUSE = 0.015  # seconds
LOW = torch.bfloat16
UNITS = {"units": ("0", "1", "2", "3"), "use_orig_params": False}
OURS = {**UNITS, "forward_prefetch": True, "sync_module_states": True}
TRAININGS = {
    "FULL_SHARD": ("lockstep", ShardSpec(**OURS)),
    "NO_SHARD": ("lockstep", ShardSpec("NO_SHARD", **OURS)),
    "low_precision": ("lockstep", ShardSpec(precision=Precision(LOW), **OURS)),
    "low_replicas": ("lockstep", ShardSpec("NO_SHARD", precision=Precision(reduce_dtype=LOW), **OURS)),
    "torch-fsdp1": ("torch-fsdp1", ShardSpec(**UNITS, forward_prefetch=True)),
    "torch-fsdp2": ("torch-fsdp2", ShardSpec(**UNITS)),
    "torch-ddp": ("torch-ddp", ShardSpec("NO_SHARD", **UNITS, sync_module_states=True)),
}


class Paused(torch.autograd.Function):
    """Take the time of an accelerator's work, which leaves the CPUs to communication."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE)
        return gradient


class Layer(nn.Linear):
    """Works before and after it uses its parameters, in forward and in backward."""

    overflows = False

    def forward(self, x):
        x = Paused.apply(torch.tanh(super().forward(Paused.apply(x))))
        if self.overflows:
            x.register_hook(overflowed)
        return x


def overflowed(gradient):
    """Return a gradient with an inf in the last column: where shards are, rank 1 alone meets it."""
    gradient = gradient.clone()
    gradient[:, -1] = torch.inf
    return gradient


def bare():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Layer(WIDTH, WIDTH)) for _ in range(4)))


def batches():
    return torch.randn(3, 2, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def learned():
    """Return the norms, and then the parameters, that the model has without an engine after two steps."""
    model, found = bare(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for both in batches()[:2]:
        model(both.reshape(-1, WIDTH)).square().mean().backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(parameter.detach() for parameter in model.parameters())]


def training(world, name, learned):
    """Train the same by an engine, and overflow in a third step: norms and parameters must be the same."""
    engine_name, spec = TRAININGS[name]
    engine = find(engine_name)
    low = spec.precision is not None and (spec.precision.param_dtype or spec.precision.reduce_dtype)
    close = {"atol": 0.02, "rtol": 0.05} if low else {"atol": 1e-5, "rtol": 1e-4}
    model = bare()
    if spec.sync_module_states and world.rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # rank 0 sends its own
    model = engine.shard(model, spec)
    optimizer = engine.optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    scaler = engine.grad_scaler(model, init_scale=8.0, growth_interval=1000)
    found = []
    for number, both in enumerate(batches()):
        next(each for each in model.modules() if isinstance(each, Layer)).overflows = number == 2
        loss = model(Paused.apply(both[world.rank].requires_grad_())).float().square().mean()
        engine.backward(model, scaler.scale(loss))
        scaler.unscale_(optimizer)
        found.append(engine.clip_grad_norm_(model, 0.5).reshape(()).float())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found[2:] = engine.full_parameters(model).values()
    for ours, expected in zip(found, learned, strict=True):
        torch.testing.assert_close(ours, expected, **close)
    world.barrier()


# No subtests, of which a rank that is ended by a race runs no more.
@pytest.mark.parametrize("number", range(1, TRIES + 1))
@pytest.mark.parametrize("name", TRAININGS)
def test_undisturbed(world, learned, name, number):
    training(world, name, learned)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.skew(seeds=[seed], milliseconds=1))
        for seed in range(1, TRIES + 1)
    ],
)
@pytest.mark.parametrize("name", TRAININGS)
def test_skewed(world, learned, name, seed, monkeypatch):
    monkeypatch.setitem(globals(), "PAUSE", 0.0)  # what comes too early fails however quick communication is
    training(world, name, learned)
