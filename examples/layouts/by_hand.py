"""A plan by hand over dp, ep, cp and tp. Each part of it is a few lines of `Ops`.

tp: heads and the inner width of experts are cut; between them each rank has a part of the sequence.
cp: each rank has the queries of a part of the sequence, and gathers all keys and values.
ep: each rank has some experts, and other rows; tokens go to their experts by all-to-all.
"""

import torch
import torch.distributed as dist
from model import OneRank, causal_attention, share

from lockstep.layouts import Sharded, ShardMap

SHARDS = ShardMap(
    {
        "*.w[qkv].weight": Sharded("tp"),
        "*.wo.weight": Sharded("tp", dim=1),
        "*.moe.w[13]": (Sharded("ep"), Sharded("tp", dim=2)),
        "*.moe.w2": (Sharded("ep"), Sharded("tp", dim=1)),
    }
)
# What cuts the batch; tp between layers alone.
ROWS, SEQUENCE = ("dp", "fsdp", "ep"), ("cp", "tp")


def all_gather(x, dim, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x, dim, group):
    parts = [part.contiguous() for part in x.chunk(group.size(), dim)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.where = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient, *ctx.where), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.where = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient, *ctx.where), None, None


class Exchange(torch.autograd.Function):
    """Sends so many rows to each rank, and receives so many from each."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.back = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None, None


class Ops(OneRank):
    def __init__(self, layout):
        self.layout = layout

    def enter(self, x):
        return Gather.apply(x, 1, self.layout.group("tp")) if self.layout["tp"] > 1 else x

    def leave(self, x):
        return ReduceScatter.apply(x, 1, self.layout.group("tp")) if self.layout["tp"] > 1 else x

    def positions(self, length):
        return torch.arange(length) + self.layout.at("cp") * length

    def attend(self, q, k, v):
        if self.layout["cp"] > 1:
            k, v = (Gather.apply(each, 2, self.layout.group("cp")) for each in (k, v))
        return causal_attention(q, k, v, self.positions(q.shape[2]))

    def run_experts(self, moe, tokens, counts):
        ranks = self.layout["ep"]
        if ranks == 1:
            return super().run_experts(moe, tokens, counts)
        group, arriving = self.layout.group("ep"), torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, arriving))
        tokens = Exchange.apply(tokens, sent, received, group)
        # They lie by sender, then by expert; experts want them by expert alone.
        expert = torch.arange(len(counts) // ranks).repeat(ranks).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        done = super().run_experts(moe, tokens[order], arriving.view(ranks, -1).sum(0))
        return Exchange.apply(done[order.argsort()], received, sent, group)


class Plan:
    """The trainer. A rank's loss is its share of the whole batch's: gradients are summed, never averaged."""

    ops, shards, share = Ops, SHARDS, staticmethod(share)

    def __init__(self, model, layout):
        self.model, self.layout = model, layout
        for module in model.modules():
            if hasattr(module, "ops"):
                module.ops = self.ops(layout)
        for name, each in model.named_parameters():
            each.data = self.shards.cut(name, each, layout)

    def __call__(self, batch, microbatches):
        tokens, labels = (self.mine(batch[name]).tensor_split(microbatches) for name in ("tokens", "labels"))
        total = torch.zeros((), dtype=torch.float64)
        for each, wanted in zip(tokens, labels, strict=True):
            part = self.share(self.model(each), wanted, batch)
            part.backward()
            total += part.detach()
        self.reduce_gradients()
        return self.sum_over(total, (*ROWS, *SEQUENCE))

    def mine(self, tensor):
        return self.layout.slice(self.layout.slice(tensor, ROWS), SEQUENCE, dim=1)

    def sum_over(self, tensor, axes):
        if axes := [axis for axis in axes if self.layout[axis] > 1]:
            dist.all_reduce(tensor, group=self.layout.group(*axes))
        return tensor

    def reduce_gradients(self):
        """Sum each gradient over the axes that cut the batch, but for those that cut the parameter."""
        for name, each in self.model.named_parameters():
            cut = self.shards.axes(name)
            self.sum_over(each.grad, [axis for axis in (*ROWS, *SEQUENCE) if axis not in cut])

    def grad_norm(self):
        total = torch.zeros((), dtype=torch.float64)
        for name, each in self.model.named_parameters():
            total += self.sum_over(each.grad.square().sum(), self.shards.axes(name))
        return total.sqrt()
