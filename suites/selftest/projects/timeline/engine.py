"""An engine as a user writes it: hybrid sharding, a shard group and a replica group, with faults to plant."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    """The whole of a sharded parameter; its gradient is reduced over both groups."""

    @staticmethod
    def forward(ctx, shard, layer):
        ctx.layer = layer
        return layer.gather(shard)

    @staticmethod
    def backward(ctx, grad):
        return ctx.layer.reduce(grad.contiguous()), None


class Sharded(nn.Module):
    """A linear layer of which each rank of the shard group keeps some rows."""

    def __init__(self, engine, width, number):
        super().__init__()
        self.engine, self.number = engine, number
        rows = width // engine.shard_group.size()
        self.shard = nn.Parameter(torch.eye(width)[engine.place * rows : (engine.place + 1) * rows].clone())

    def forward(self, x):
        return x @ Gather.apply(self.shard, self)

    def gather(self, shard):
        parts = [torch.empty_like(shard) for _ in range(self.engine.shard_group.size())]
        dist.all_gather(parts, shard.detach(), group=self.engine.shard_group)
        return torch.cat(parts)

    def reduce(self, grad):
        engine = self.engine
        if engine.has("dies_in_backward") and self.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.has("crashes_in_backward"):
            os.abort()
        return engine.average_over_replicas(engine.own_rows(engine.sum_over_shards(grad)))


class Engine:
    """Shards a stack of layers over `shards` ranks, and replicates that over the others.

    Args:
        fault: the mistake of rank 1; "" for none.
    """

    def __init__(self, world, shards=2, fault=""):
        self.world, self.fault = world, fault
        ranks = torch.arange(world.size).reshape(-1, shards)
        self.place = world.rank % shards
        self.metrics_group = dist.new_group()
        for row in ranks.tolist():
            group = dist.new_group(row)
            self.shard_group = group if world.rank in row else getattr(self, "shard_group", None)
        for column in ranks.T.tolist():
            group = dist.new_group(column)
            self.replica_group = group if world.rank in column else getattr(self, "replica_group", None)

    def has(self, fault):
        return self.fault == fault and self.world.rank == 1

    def model(self, width=8, depth=3):
        return nn.Sequential(*(Sharded(self, width, number) for number in range(depth)))

    def sum_over_shards(self, grad):
        dist.all_reduce(grad, group=self.shard_group)
        return grad

    def own_rows(self, grad):
        return grad.chunk(self.shard_group.size())[self.place].contiguous()

    def average_over_replicas(self, grad):
        dist.all_reduce(grad, group=self.replica_group)
        return grad / self.replica_group.size()

    def average_of_all(self, loss):
        dist.all_reduce(loss, group=self.metrics_group)
        return loss / self.world.size

    def clip(self, model, most=1.0):
        norm = sum(layer.shard.grad.square().sum() for layer in model)
        if self.has("other_dtype"):
            norm = norm.double()
        dist.all_reduce(norm, group=self.shard_group)
        for layer in model:
            layer.shard.grad.mul_(min(1.0, most / float(norm.sqrt())))

    def step(self, model, x, rate=0.1):
        loss = model(x).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        if self.has("other_order"):
            self.average_of_all(mean)
            self.clip(model)
        else:
            self.clip(model)
            self.average_of_all(mean)
        with torch.no_grad():
            for layer in model:
                layer.shard -= rate * layer.shard.grad
                layer.shard.grad = None
        if self.has("waits_for_all"):
            dist.barrier()
        return mean

    def save(self, model):
        return [layer.gather(layer.shard) for layer in model]
