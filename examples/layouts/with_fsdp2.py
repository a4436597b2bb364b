"""The plan by FSDP2, over fsdp, with replicas over dp (HSDP)."""

import torch
import torch.distributed as dist
from model import share
from torch.distributed.fsdp import fully_shard


def shard(model, mesh):
    """Shard each layer, and what remains. Gradients are the mean over all ranks of the mesh."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Plan:
    """The trainer. As gradients are averaged, a rank's loss is its share times the number of ranks."""

    shard = staticmethod(shard)
    axes = ("dp", "fsdp")

    def __init__(self, model, layout):
        self.model, self.layout = model, layout
        self.shard(model, layout.mesh)

    def __call__(self, batch, microbatches):
        _, ranks = self.layout.part(self.axes)
        mine = (self.layout.slice(batch[name], self.axes) for name in ("tokens", "labels"))
        tokens, labels = (each.tensor_split(microbatches) for each in mine)
        total = torch.zeros((), dtype=torch.float64)
        for each, wanted in zip(tokens, labels, strict=True):
            part = share(self.model(each), wanted, batch)
            (part * ranks).backward()
            total += part.detach()
        if ranks > 1:
            dist.all_reduce(total, group=self.layout.group(*self.axes))
        return total

    def grad_norm(self):
        return torch.nn.utils.get_total_norm([each.grad for each in self.model.parameters()])
