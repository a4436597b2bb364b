"""ZeRO-1 by hand: replicas with an optimizer that holds the state of a part of each parameter."""

import torch
import torch.distributed as dist
from sample_engine import HandDDP

from lockstep.conformance import Capability


class ShardedOptimizer:
    """One of torch's optimizers over this rank's part of each parameter.

    The parts are views into the parameters, so that what it writes is in place; then ranks exchange parts.
    """

    def __init__(self, parameters, make):
        self.whole = list(parameters)
        self.parts = [torch.nn.Parameter(self.part_of(p.detach()), p.requires_grad) for p in self.whole]
        self.inner = make(self.parts)
        self.param_groups = [{"params": self.whole}]  # where a gradient scaler finds gradients

    @staticmethod
    def part_of(tensor):
        size, rank = dist.get_world_size(), dist.get_rank()
        return tensor.view(-1).tensor_split(size)[rank]

    def zero_grad(self, set_to_none=True):
        for parameter in self.whole:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self):
        for parameter, part in zip(self.whole, self.parts, strict=True):
            part.data = self.part_of(parameter.data)  # the model may have been converted since
            part.grad = None if parameter.grad is None else self.part_of(parameter.grad)
        self.inner.step()
        self.exchange()

    def exchange(self):
        for parameter in self.whole:
            for rank, part in enumerate(parameter.data.view(-1).tensor_split(dist.get_world_size())):
                dist.broadcast(part, rank)


class HandZero1(HandDDP):
    """Gradients become means on all ranks, and each rank steps its part of the parameters."""

    name = "hand-zero1"
    capabilities = HandDDP.capabilities - {Capability.OPTIMIZER_STATE}

    def optimizer(self, model, make):
        return ShardedOptimizer(model.parameters(), make)
