"""Context parallelism by Ulysses: for attention, ranks exchange parts of the sequence for heads."""

from math import gcd

import by_hand
import torch
import torch.distributed as dist
from model import causal_attention

from lockstep.layouts import NotOffered


class Swap(torch.autograd.Function):
    """Cuts one dimension over ranks and makes another whole; its gradient goes the way back."""

    @staticmethod
    def forward(ctx, x, cut, whole, group):
        ctx.back = whole, cut, group
        sent = [part.contiguous() for part in x.chunk(group.size(), cut)]
        received = torch.empty_like(torch.cat(sent))
        dist.all_to_all_single(received, torch.cat(sent), group=group)
        return torch.cat(received.chunk(group.size()), whole)

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient, *ctx.back), None, None, None


class Ops(by_hand.Ops):
    def attend(self, q, k, v):
        ranks = self.layout["cp"]
        if ranks == 1:
            return super().attend(q, k, v)
        group, kv_heads = self.layout.group("cp"), k.shape[1]
        copies = ranks // gcd(kv_heads, ranks)  # where there are fewer of them than ranks
        if q.shape[1] % (kv_heads * copies):
            raise NotOffered(f"{q.shape[1]} heads over {ranks} ranks of cp")
        k, v = (each.repeat_interleave(copies, 1) for each in (k, v))
        q, k, v = (Swap.apply(each, 1, 2, group) for each in (q, k, v))
        return Swap.apply(causal_attention(q, k, v, torch.arange(q.shape[2])), 2, 1, group)


class Plan(by_hand.Plan):
    ops = Ops
