"""Context parallelism by ring attention: keys and values go round, and no rank has all of them."""

import by_hand
import torch
import torch.distributed as dist
from model import HEAD_WIDTH


def pass_on(tensors, group):
    """Send tensors to the next rank of the ring, and return those of the one before."""
    rank, size = group.rank(), group.size()
    to, source = (dist.get_global_rank(group, each % size) for each in (rank + 1, rank - 1))
    received = [torch.empty_like(each) for each in tensors]
    sends = [dist.P2POp(dist.isend, each.contiguous(), to, group) for each in tensors]
    receives = [dist.P2POp(dist.irecv, each, source, group) for each in received]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    return received


def scores_of(q, k, step, group):
    """Return the scores of this rank's queries for the keys that have come `step` ranks far."""
    length, owner = q.shape[2], (group.rank() - step) % group.size()
    late = torch.arange(length) + owner * length > (torch.arange(length) + group.rank() * length)[:, None]
    return (q @ k.transpose(2, 3) * HEAD_WIDTH**-0.5).masked_fill(late, float("-inf"))


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        total, kv = torch.zeros_like(q), [k, v]
        log_sum = torch.full_like(q[..., :1], float("-inf"))  # of all scores so far
        for step in range(group.size()):
            scores = scores_of(q, kv[0], step, group)
            more = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
            total = total * (log_sum - more).exp() + (scores - more).exp() @ kv[1]
            log_sum, kv = more, pass_on(kv, group)
        ctx.save_for_backward(q, k, v, total, log_sum)
        ctx.group = group
        return total

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, log_sum = ctx.saved_tensors
        of_q, common = torch.zeros_like(q), (gradient * out).sum(-1, keepdim=True)
        ring = [k, v, torch.zeros_like(k), torch.zeros_like(v)]  # gradients travel with what they are of
        for step in range(ctx.group.size()):
            k, v, of_k, of_v = ring
            weights = (scores_of(q, k, step, ctx.group) - log_sum).exp()
            of_scores = weights * (gradient @ v.transpose(2, 3) - common) * HEAD_WIDTH**-0.5
            of_q += of_scores @ k
            of_k, of_v = of_k + of_scores.transpose(2, 3) @ q, of_v + weights.transpose(2, 3) @ gradient
            ring = pass_on([k, v, of_k, of_v], ctx.group)
        return of_q, ring[2], ring[3], None


class Ops(by_hand.Ops):
    def attend(self, q, k, v):
        if self.layout["cp"] == 1:
            return super().attend(q, k, v)
        copies = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(copies, 1) for each in (k, v))
        return RingAttention.apply(q, k, v, self.layout.group("cp"))


class Plan(by_hand.Plan):
    ops = Ops
