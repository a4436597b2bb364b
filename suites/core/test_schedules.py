"""Ranks that are late anywhere in a step: what a model learns has the bits of the undisturbed run.

Under the mark `skew` each rank is delayed by a seed, and what uses a collective's tensors too early fails.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, offers, require
from lockstep.conformance.models import NestedWrappedModule, copier

pytestmark = pytest.mark.ranks(2)

# What comes too early fails whatever the delay is, so that short ones do.
UNDER_SCHEDULES = pytest.mark.skew(seeds=20, milliseconds=1)


class Recomputed(NestedWrappedModule):
    """The nested model, whose units are computed again in backward."""

    def forward(self, x):
        for index, layer in enumerate(self.module):
            x = checkpoint(layer, x, use_reentrant=False) if index in (1, 2) else layer(x)
        return x


@dataclass(frozen=True)
class Life:
    """Two steps of a model, of so many microbatches each; the last of them alone syncs if not `sync`."""

    model: Callable[[], nn.Module] = NestedWrappedModule
    spec: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    sync: bool = True
    scaler: bool = False
    clips: bool = False


LIVES = {
    "steps": Life(),
    "no_sync": Life(microbatches=2, sync=False),
    "checkpointing": Life(model=Recomputed),
    "offload": Life(spec={"offload": True}),
    "scaler": Life(scaler=True, clips=True),
}
# By strategy what is sent differs, by life when: each is there, and not all with all.
CASES = [
    *(("steps", front) for front in ("FULL_SHARD-flat", "NO_SHARD-orig", "fully_shard")),
    *(("no_sync", front) for front in ("SHARD_GRAD_OP-orig", "NO_SHARD-orig")),
    *(("checkpointing", front) for front in ("FULL_SHARD-orig", "NO_SHARD-orig")),
    ("offload", "FULL_SHARD-flat"),
    *(("scaler", front) for front in ("FULL_SHARD-flat", "NO_SHARD-orig")),
]


def live(front, model, batch, life):
    """Train for two steps; return losses, the last gradients and the parameters, whole, by name."""
    optimizer = front.optimizer(model, partial(torch.optim.SGD, lr=0.01, momentum=0.9))
    scaler = front.engine.grad_scaler(model, init_scale=8.0) if life.scaler else None
    learned = {}
    for step in range(2):
        for number in range(life.microbatches):
            is_last = number == life.microbatches - 1
            with nullcontext() if life.sync or is_last else front.no_sync(model):
                loss = model(batch(2 * step + number)).float().square().sum()
                front.backward(model, scaler.scale(loss) if scaler else loss)
            learned[f"loss {step}.{number}"] = loss.detach()
        if scaler:
            scaler.unscale_(optimizer)
        if life.clips and offers(front, Capability.CLIPPING):
            learned[f"norm {step}"] = front.clip_grad_norm_(model, 0.5)
        if step:
            learned |= {f"gradient of {name}": g for name, g in front.full_gradients(model).items()}
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return learned | front.full_parameters(model)


@pytest.fixture
def lives(world, batches):
    """Return a function that trains a new model, and what that learns undisturbed."""

    def make(front, life, **spec):
        batch = batches(NestedWrappedModule.batch)
        copied = copier(life.model())

        def again():
            return live(front, front.shard(copied(), **life.spec, **spec), batch, life)

        return again, again()

    return make


@pytest.fixture
def on_all_ranks(engine, front, lives, request):
    if request.param == "scaler":
        require(engine, Capability.GRAD_SCALER)
    return lives(front, LIVES[request.param])


@pytest.mark.parametrize(("on_all_ranks", "front"), CASES, indirect=True)
@UNDER_SCHEDULES
def test_late_ranks_change_no_bit_of_what_is_learned(on_all_ranks):
    again, undisturbed = on_all_ranks
    assert_named_close(again(), undisturbed, EXACT)


@pytest.fixture
def on_a_mesh(world, hybrid_front, lives):
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    return lives(hybrid_front, LIVES["steps"], mesh=mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hybrid_front", ["HYBRID_SHARD", "fully_shard"], indirect=True)
@UNDER_SCHEDULES
def test_late_ranks_of_replicas_change_no_bit(on_a_mesh):
    again, undisturbed = on_a_mesh
    assert_named_close(again(), undisturbed, EXACT)
