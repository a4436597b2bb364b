"""A tiny Llama with mixtures of experts, and its loss. It knows nothing of ranks: plans change its `ops`."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, INNER, EXPERTS, CHOSEN = 32, 16, 4, 2, 4, 8, 4, 2


class OneRank:
    """What plans change. `enter` and `leave` enclose what tensor parallelism cuts."""

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def positions(self, length):
        return torch.arange(length)

    def attend(self, q, k, v):
        return causal_attention(q, k, v, torch.arange(q.shape[2]))

    def run_experts(self, moe, tokens, counts):
        """Run experts on tokens that are sorted by expert, `counts` of them each."""
        parts = tokens.split(counts.tolist())
        each = zip(parts, moe.w1, moe.w2, moe.w3, strict=True)
        return torch.cat([(F.silu(x @ w1) * (x @ w3)) @ w2 for x, w1, w2, w3 in each])


def causal_attention(q, k, v, positions):
    """Attention of queries at some positions to keys from 0 on: (batch, heads, tokens, width)."""
    mask = torch.arange(k.shape[2]) <= positions[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def rotate(x, positions):
    """Rotary position embedding."""
    first, second = x.chunk(2, -1)
    speeds = 100.0 ** -(torch.arange(first.shape[-1], dtype=x.dtype) / first.shape[-1])
    angle = positions[:, None] * speeds
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = OneRank()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = self.ops.enter(x)
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        positions = self.ops.positions(q.shape[2])
        mixed = self.ops.attend(rotate(q, positions), rotate(k, positions), v)
        return self.ops.leave(self.wo(mixed.transpose(1, 2).flatten(2)))


class MoE(nn.Module):
    """Each token goes to two experts, which are SwiGLUs."""

    def __init__(self):
        super().__init__()
        self.ops = OneRank()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)

    def forward(self, x):
        logits = self.router(x)
        penalty = logits.logsumexp(-1).square().sum()  # the "z-loss": a sum over tokens
        x, logits = self.ops.enter(x), self.ops.enter(logits)
        tokens = x.flatten(0, 1)
        weights, experts = logits.flatten(0, 1).softmax(-1).topk(CHOSEN)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=EXPERTS)
        done = self.ops.run_experts(self, tokens[order // CHOSEN], counts)
        done = done * weights.flatten()[order, None]
        y = torch.zeros_like(tokens).index_add(0, order // CHOSEN, done)
        return self.ops.leave(y.view_as(x)), penalty


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention, self.moe = Attention(), MoE()

    def forward(self, x, penalty):
        x = x + self.attention(self.attention_norm(x))
        y, more = self.moe(self.moe_norm(x))
        return x + y, penalty + more


class Llama(nn.Module):
    """The model; a stage of a pipeline has some layers, and None for the embedding or the head."""

    def __init__(self, blocks, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(blocks)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x, penalty=None):
        x = self.embed(x) if self.embed else x
        penalty = x.new_zeros(1) if penalty is None else penalty
        for layer in self.layers.values():
            x, penalty = layer(x, penalty)
        return self.head(self.norm(x)) if self.head else x, penalty


def build(blocks=2, tied=False):
    torch.manual_seed(0)
    model = Llama(blocks, tied).double()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:  # weights that are all 1 hide who uses them
                each.uniform_(0.5, 1.5)
    return model


def build_tied():
    return build(tied=True)


def share(output, labels, whole):
    """Return what the output on a part of a batch adds to the loss of the whole batch: shares add up."""
    logits, penalty = output
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return entropy / (whole["labels"] >= 0).sum() + 0.01 * penalty.sum() / whole["labels"].numel()


def loss(model, batch):
    return share(model(batch["tokens"]), batch["labels"], batch)
