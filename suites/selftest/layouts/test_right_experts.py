"""Right plans of experts on ranks of their own hold, and a bug in one is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.layouts import Layout, Sharded, ShardMap, assert_same_as_unsharded
from suites.selftest.layouts.mlps import mean_square, pairs
from suites.selftest.layouts.model import Gathered, Summed, SummedBackward


class Experts(nn.Module):
    """A layer of experts, of which a router chooses one for each token."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(experts, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        return x + scores[:, None] * self.apply_experts(x, F.one_hot(chosen, 4).to(x.dtype))

    def apply_experts(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ni,ne,eij->nj", x, chosen, self.experts)


class ShardedExperts(Experts):
    """Each ep rank has some of the experts, and computes what these do for the tokens of all."""

    layout: Layout

    def apply_experts(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        index, count = self.layout.part("ep")
        group = self.layout.group("ep")
        everywhere = Gathered.apply(x[None, None], group)[0, 0]
        of_all = [torch.empty_like(chosen) for _ in range(count)]
        dist.all_gather(of_all, chosen, group=group)
        mine = torch.cat(of_all).chunk(count, 1)[index]
        total = Summed.apply(super().apply_experts(everywhere, mine), group)
        total = SummedBackward.apply(total, group)
        return total.chunk(count)[index]


class ExpertPlan:
    """The trainer of experts over ep; with a bug it reduces their gradients over ep, too."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        self.layout, self.bug = layout, bug
        self.model = ShardedExperts(4 // layout["ep"]).double()
        self.model.layout = layout
        EXPERTS.write(self.model, model, layout)

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
        x, y = (self.layout.slice(batch[name], "ep").chunk(microbatches) for name in "xy")
        total = torch.zeros((), dtype=torch.float64)
        for part in range(microbatches):
            loss = (self.model(x[part]) - y[part]).square().sum() / batch["y"].numel()
            loss.backward()
            total += loss.detach()
        for name, each in self.model.named_parameters():
            if name != "experts" or self.bug == "reduced":
                dist.all_reduce(each.grad, group=self.layout.group("ep"))
        dist.all_reduce(total, group=self.layout.group("ep"))
        return total


EXPERTS = ShardMap({"experts": Sharded("ep")})


def build_experts() -> Experts:
    torch.manual_seed(4)
    return Experts().double()


@pytest.mark.layouts(ep=(1, 2))
def test_experts_on_ranks_of_their_own_hold(layout: Layout) -> None:
    arguments = (layout, build_experts, ExpertPlan, pairs(), mean_square)
    assert_same_as_unsharded(*arguments, shards=EXPERTS)


@pytest.mark.layouts(ep=(1, 2))
def test_expert_gradients_that_are_reduced_over_ep_are_named(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> ExpertPlan:
        return ExpertPlan(model, layout, "reduced")

    with pytest.raises(
        AssertionError, match="gradient of `experts` is the sum of the parts of all ranks of ep"
    ):
        assert_same_as_unsharded(layout, build_experts, parallelize, pairs(), mean_square, shards=EXPERTS)
