"""The plan by DistributedDataParallel, over dp."""

import torch
import torch.distributed as dist
from model import share
from torch.nn.parallel import DistributedDataParallel


class Plan:
    """The trainer. As gradients are averaged, a rank's loss is its share times the number of ranks."""

    def __init__(self, model, layout):
        self.layout, self.model = layout, DistributedDataParallel(model, device_mesh=layout.mesh)

    def __call__(self, batch, microbatches):
        tokens, labels = (
            self.layout.slice(batch[name], "dp").chunk(microbatches) for name in ("tokens", "labels")
        )
        total = torch.zeros((), dtype=torch.float64)
        for number, (each, wanted) in enumerate(zip(tokens, labels, strict=True), 1):
            self.model.require_backward_grad_sync = number == microbatches  # as `no_sync()` does
            part = share(self.model(each), wanted, batch)
            (part * self.layout["dp"]).backward()
            total += part.detach()
        dist.all_reduce(total)
        return total
