"""A model of one block with what examples/layouts/model.py lacks, and a plan by hand over dp, cp and tp.

Packed weights, biases, a sink of attention, a constant, dropout, a balance loss, and a second head for the
token after the next.
"""

import by_hand
import model
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.layouts import Sharded, ShardMap, witness_batches

VOCAB, WIDTH, HEADS, HEAD_WIDTH, INNER, EXPERTS = 32, 16, 4, 4, 8, 4


class OneRank(model.OneRank):
    def first(self, x):
        """Return the position of the first token of `x`."""
        return 0

    def gather(self, x):
        return x

    def count(self, counts):
        return counts


def drop(x, tokens, first):
    """Drop a quarter; the mask is a function of token, position and channel."""
    positions = torch.arange(x.shape[1])[:, None] + first
    seeds = tokens[..., None] * 7919 + positions * 104729 + torch.arange(x.shape[2]) * 1299709
    return x * ((seeds * 2654435761 >> 16) % 4 > 0) / 0.75


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = OneRank()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias, self.sink = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        packed = self.wqkv(self.ops.enter(x))
        q, k, v = packed.unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        k, v = self.ops.gather(k), self.ops.gather(v)
        late = torch.arange(k.shape[2]) > self.ops.positions(q.shape[2])[:, None]
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(late, float("-inf"))
        sink = self.sink[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return self.ops.leave(self.wo(mixed)) + self.bias


class Experts(nn.Module):
    """An MLP, its output times the largest of some probabilities, which are to be used evenly."""

    def __init__(self):
        super().__init__()
        self.ops = OneRank()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        odds = self.gate(x).softmax(-1)
        counts = F.one_hot(odds.argmax(-1), EXPERTS).sum(1).double()
        counts = self.ops.count(counts)  # of each sequence
        y = self.ops.leave(self.down(F.silu(self.up(self.ops.enter(x))))) + 0.1
        return y * odds.amax(-1, keepdim=True), (counts[:, None] * odds).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = OneRank()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        self.experts_norm, self.experts = nn.RMSNorm(WIDTH, eps=1e-6), Experts()
        self.head, self.second = (nn.Linear(WIDTH, VOCAB, bias=False) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.attention(self.attention_norm(x))
        x = x + drop(y, tokens, self.ops.first(y))
        y, balance = self.experts(self.experts_norm(x))
        return self.head(x + y), self.second(x + y), balance


def build():
    torch.manual_seed(0)
    model = Model().double()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:
                each.uniform_(0.5, 1.5)
    return model


def with_next(batch):
    """Return a batch with two labels for each token: the next one, and the one after."""
    after = torch.full_like(batch["labels"], -100)
    after[:, :-1] = batch["labels"][:, 1:]
    return {**batch, "labels": torch.stack([batch["labels"], after], -1)}


BATCHES = [with_next(batch) for batch in witness_batches(VOCAB)]


def entropy_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def second_share(output, labels, whole):
    return 0.3 * entropy_of(output[1], labels[..., 1]) / (whole["labels"][..., 1] >= 0).sum()


def balance_share(output, whole):
    return 0.1 * output[2] / whole["labels"][..., 0].numel() / whole["labels"].shape[1]


def share(output, labels, whole):
    entropy = entropy_of(output[0], labels[..., 0]) / (whole["labels"][..., 0] >= 0).sum()
    return entropy + second_share(output, labels, whole) + balance_share(output, whole)


def loss(model, batch):
    return share(model(batch["tokens"]), batch["labels"], batch)


TERMS = {
    "second": lambda model, batch: second_share(model(batch["tokens"]), batch["labels"], batch),
    "balance": lambda model, batch: balance_share(model(batch["tokens"]), batch),
}


class Ops(OneRank, by_hand.Ops):
    enter, leave, positions = by_hand.Ops.enter, by_hand.Ops.leave, by_hand.Ops.positions

    def first(self, x):
        return self.layout.part(by_hand.SEQUENCE)[0] * x.shape[1]

    def gather(self, x):
        return by_hand.Gather.apply(x, 2, self.layout.group("cp")) if self.layout["cp"] > 1 else x

    def count(self, counts):
        if self.layout.part(by_hand.SEQUENCE)[1] > 1:
            torch.distributed.all_reduce(counts, group=self.layout.group(*by_hand.SEQUENCE))
        return counts


class Plan(by_hand.Plan):
    ops, share = Ops, staticmethod(share)
    shards = ShardMap(
        {
            "*.wqkv.*": Sharded("tp", parts=(WIDTH, WIDTH, WIDTH)),
            "*.wo.weight": Sharded("tp", dim=1),
            "*.sink": Sharded("tp"),
            "*.up.*": Sharded("tp"),
            "*.down.weight": Sharded("tp", dim=1),
        }
    )
