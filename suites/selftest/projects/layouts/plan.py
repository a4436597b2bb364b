"""A model, and its plan over dp, with an asynchronous all-reduce."""

import torch
import torch.distributed as dist
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()


def batches(rows=12):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def loss(model, batch):
    return model(batch).square().mean()


class Plan:
    def __init__(self, model, layout):
        self.model, self.layout = model, layout

    def __call__(self, batch, microbatches):
        total = torch.zeros((), dtype=torch.float64)
        for each in self.layout.slice(batch, "dp").chunk(microbatches):
            part = self.model(each).square().sum() / batch.shape[0] / 2
            part.backward()
            total += part.detach()
        self.reduce([total, *(each.grad for each in self.model.parameters())])
        return total

    def reduce(self, tensors):
        if self.layout["dp"] > 1:
            group = self.layout.group("dp")
            works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
            self.wait(works)

    def wait(self, works):
        for work in works:
            work.wait()


class RacingPlan(Plan):
    def wait(self, works):
        pass


class PlanOfManyRows(Plan):
    """Wrong for more than 14 rows on dp2; on tp2 all ranks do the same."""

    def __call__(self, batch, microbatches):
        total = super().__call__(batch, microbatches)
        if (self.layout["dp"], self.layout["tp"]) == (2, 1) and len(batch) > 14:
            self.model[0].weight.grad *= 3
        return total


class CompiledPlan(Plan):
    """Compiled around the model, whose parameters have other names by that."""

    def __init__(self, model, layout):
        super().__init__(torch.compile(model, backend="aot_eager", dynamic=True), layout)


class CompiledPlanWithoutReduction(CompiledPlan):
    def reduce(self, tensors):
        super().reduce([tensors[0], *tensors[2:]])
