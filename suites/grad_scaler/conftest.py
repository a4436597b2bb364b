"""A model that is trained with a gradient scaler."""

from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch.distributed.tensor import DTensor

from lockstep.conformance import Capability, ShardSpec, offers


class Trained:
    """A model with its scaler, whose scale is 8 at first, and an optimizer whose step subtracts gradients.

    It is sharded where no strategy is named and the engine shards, else replicated: `in_shards`.
    """

    def __init__(self, world, engine, bare, scaling=MappingProxyType({}), **spec):
        self.world, self.engine = world, engine
        spec = {"strategy": "FULL_SHARD" if offers(engine, Capability.SHARDING) else "NO_SHARD", **spec}
        self.in_shards = spec["strategy"] != "NO_SHARD"
        self.model = engine.shard(bare.to(world.device), ShardSpec(device=world.device, **spec))
        self.scaler = engine.grad_scaler(self.model, **{"init_scale": 8.0, **scaling})
        self.optimizers = [self.optimizer_of(self.model)]

    @property
    def spread(self):
        """Return this rank's factor of gradients: 1 in the mean of all ranks and of each pair of them."""
        rank = self.world.rank
        return 1.0 if rank == self.world.size - 1 and rank % 2 == 0 else 0.5 + rank % 2

    def optimizer_of(self, module):
        return self.engine.optimizer(module, partial(torch.optim.SGD, lr=1.0))

    def backward(self, *gradients):
        """Give the weights these gradients, in the mean of ranks that see different ones."""
        device = self.world.device
        own = [torch.as_tensor(g, dtype=torch.float32, device=device) * self.spread for g in gradients]
        self.engine.backward(self.model, self.scaler.scale(self.model(*own)))

    def step(self, *gradients, unscale_first=False):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(*gradients)
        self.finish(unscale_first)

    def finish(self, unscale_first=False):
        for optimizer in self.optimizers * unscale_first:
            self.scaler.unscale_(optimizer)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def weights(self):
        """Return the elements of each weight."""
        return [weight.tolist() for weight in self.engine.full_parameters(self.model).values()]

    def scales(self):
        """Return the scale of each rank."""
        return self.world.gather(self.scaler.get_scale())

    def finite(self):
        """Return, for each rank, whether its part of all gradients is finite.

        In torch 2.15 `isfinite().all()` of a DTensor is the answer of all ranks, before it was that of one.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return self.world.gather(all(bool(g.isfinite().all()) for g in own))


@pytest.fixture
def trained(world, engine):
    """Make a `Trained` from a bare model, settings of its scaler, and a spec."""
    return partial(Trained, world, engine)
