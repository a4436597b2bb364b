"""The plan by hand on more ranks of tp than there are heads of keys and values: some ranks share one."""

import by_hand
import torch
from model import HEAD_WIDTH, KV_HEADS

from lockstep.layouts import Sharded, ShardMap


def rows(length, count, index):
    """Return the rows of the one head that a rank has."""
    head = index * KV_HEADS // count
    return range(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)


class Plan(by_hand.Plan):
    shards = ShardMap({"*.w[kv].weight": Sharded("tp", rows=rows), **by_hand.SHARDS.rules})

    def reduce_gradients(self):
        super().reduce_gradients()
        for name, each in self.model.named_parameters():
            if "wk" in name or "wv" in name:
                whole = torch.zeros(KV_HEADS * HEAD_WIDTH, each.shape[1], dtype=each.dtype)
                mine = list(rows(len(whole), self.layout["tp"], self.layout.at("tp")))
                whole[mine] = each.grad
                self.sum_over(whole, ("tp",))
                each.grad = whole[mine]

    def grad_norm(self):
        total, copies = super().grad_norm().square(), self.layout["tp"] // KV_HEADS
        for name, each in self.model.named_parameters():
            if "wk" in name or "wv" in name:
                total -= self.sum_over(each.grad.square().sum(), ("tp",)) * (1 - 1 / copies)
        return total.sqrt()
