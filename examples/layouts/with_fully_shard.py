"""The plan by `lockstep.engine.fully_shard`, over fsdp, with replicas over dp."""

import with_fsdp2

from lockstep.engine import fully_shard


def shard(model, mesh):
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Plan(with_fsdp2.Plan):
    shard = staticmethod(shard)
