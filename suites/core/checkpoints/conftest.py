"""A model and an optimizer that have trained."""

from functools import partial

import pytest
import torch

from lockstep.conformance import ShardSpec
from lockstep.conformance.models import UnevenShapes

adamw = partial(torch.optim.AdamW, lr=0.01)


class Training:
    """A model and its optimizer after some steps; ranks train on the same batches unless `apart`."""

    def __init__(self, engine, world, steps, bare=UnevenShapes, make=adamw, apart=0, group=None, **spec):
        self.engine, self.device, self.apart = engine, world.device, apart * world.rank
        self.group = None if isinstance(group, tuple) else group
        torch.manual_seed(steps)
        spec = {"units": UnevenShapes.units, "device": world.device, "process_group": group, **spec}
        self.model = engine.shard(bare().to(world.device), ShardSpec(**spec))
        self.optimizer = engine.optimizer(self.model, make)
        self.both = self.model, self.optimizer
        for number in range(steps):
            self.step(number)

    def step(self, number):
        generator = torch.Generator().manual_seed(100 * number + self.apart)
        batch = UnevenShapes.batch(generator).to(self.device)
        self.optimizer.zero_grad()
        self.engine.backward(self.model, UnevenShapes.loss(self.model(batch)))
        self.optimizer.step()


@pytest.fixture
def train(engine, world):
    """Make a `Training` of this engine and world: `train(steps, **settings)`."""
    return partial(Training, engine, world)
