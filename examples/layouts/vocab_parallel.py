"""The vocabulary cut over tp, too: embedding, head and cross entropy. No rank has all logits."""

import by_hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import share
from torch import nn

from lockstep.layouts import Sharded, ShardMap


class Sum(torch.autograd.Function):
    """A sum over ranks; its gradient is one, too, as the loss is the sum of all ranks' shares."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient, ctx.group), None


def pick(ids, rows, group):
    """Return which ids are among this rank's rows of the vocabulary, and their places there, else 0."""
    places = ids - group.rank() * rows
    is_mine = (places >= 0) & (places < rows)
    return is_mine, places.where(is_mine, 0)


class Embedding(nn.Module):
    def __init__(self, weight, group):
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, tokens):
        is_mine, places = pick(tokens, len(self.weight), self.group)
        x = F.embedding(places, self.weight) * is_mine[..., None]
        return by_hand.ReduceScatter.apply(x, 1, self.group)


class Head(nn.Module):
    def __init__(self, weight, group):
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, x):
        return F.linear(by_hand.Gather.apply(x, 1, self.group), self.weight)


def cross_entropy(logits, labels, group):
    """Return the sum over tokens, the same on each rank of the group."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = Sum.apply((logits - largest[..., None]).exp().sum(-1), group).log() + largest
    is_mine, places = pick(labels, logits.shape[-1], group)
    of_labels = Sum.apply(logits.gather(-1, places[..., None])[..., 0] * is_mine, group)
    return ((log_sum - of_labels) * (labels >= 0)).sum()


class Plan(by_hand.Plan):
    # One entry for embedding and head: where they are tied, the model has no head.weight.
    shards = ShardMap({**by_hand.SHARDS.rules, "[eh]*.weight": Sharded("tp")})

    def __init__(self, model, layout):
        super().__init__(model, layout)
        if layout["tp"] > 1:
            group = layout.group("tp")
            model.embed, model.head = Embedding(model.embed.weight, group), Head(model.head.weight, group)

    def mine(self, tensor):
        """Return this rank's part of a batch, that all ranks of tp have: the embedding cuts the sequence."""
        return self.layout.slice(self.layout.slice(tensor, by_hand.ROWS), "cp", dim=1)

    def share(self, output, labels, whole):
        if self.layout["tp"] == 1:
            return share(output, labels, whole)
        logits, penalty = output
        entropy = cross_entropy(logits, labels, self.layout.group("tp")) / self.layout["tp"]
        return entropy / (whole["labels"] >= 0).sum() + 0.01 * penalty.sum() / whole["labels"].numel()
