"""Right plans hold: by hand, with DTensor, FSDP2, our engine, DDP, checkpoints and a loss by parts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import engine
from lockstep.backends.gloo import MOST_WAITING
from lockstep.layouts import Layout, NotOffered, Sharded, ShardMap, assert_same_as_unsharded
from suites.selftest.layouts.mlps import BATCHES, Mlp, build_even, build_mlps, mean_square, pairs
from suites.selftest.layouts.model import SHARDS, PlanWithNorm, Summed, SummedBackward, build, loss


@pytest.mark.layouts(dp=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plans_by_hand_hold(layout: Layout) -> None:
    notes = assert_same_as_unsharded(layout, build, PlanWithNorm, BATCHES, loss, shards=SHARDS)
    assert notes == []


@pytest.mark.layouts(fsdp=(2,), tp=(2,))
def test_what_tensor_parallelism_cut_is_sharded_further(layout: Layout) -> None:
    class Cut(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = F.silu(self.up(SummedBackward.apply(x, layout.group("tp"))))
            return x + Summed.apply(F.linear(up, self.down.weight), layout.group("tp")) + self.down.bias

    shards = ShardMap({"*.up.*": Sharded("tp"), "*.down.weight": Sharded("tp", dim=1)})

    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        cut = nn.Sequential(*(Cut(3) for _ in model.children())).double()
        shards.write(cut, model, layout)
        for block in cut.children():
            fully_shard(block, mesh=layout.mesh["fsdp"])
        fully_shard(cut, mesh=layout.mesh["fsdp"])
        return cut

    assert_same_as_unsharded(layout, build_even, parallelize, pairs(), mean_square, shards=shards)


@pytest.mark.parametrize("front", [fully_shard, engine.fully_shard], ids=["fsdp2", "engine"])
@pytest.mark.layouts(fsdp=(1, 2))
def test_modules_that_shard_themselves_hold(layout: Layout, front: object) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        assert callable(front)
        for block in model.children():
            front(block, mesh=layout.mesh["fsdp"])
        front(model, mesh=layout.mesh["fsdp"])
        return model

    assert_same_as_unsharded(layout, build_mlps, parallelize, pairs(), mean_square)


def shard_in_place(model: nn.Module, layout: Layout) -> nn.Module:
    for block in model.children():
        if layout["tp"] > 1:
            parallelize_module(block, layout.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout["fsdp"] > 1:
            fully_shard(block, mesh=layout.mesh["fsdp"])
    return model


@pytest.mark.layouts(fsdp=(1, 2), tp=(1, 2), at_most=4)
def test_tensor_parallel_modules_hold(layout: Layout) -> None:
    assert_same_as_unsharded(layout, build_even, shard_in_place, pairs(), mean_square)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 7.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Temperature(nn.Module):
    """As of a contrastive loss: a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def build_with_temperature() -> nn.Sequential:
    return build_mlps().append(Temperature())


@pytest.mark.layouts(dp=(1, 2))
def test_a_parameter_without_dims_holds(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        return DistributedDataParallel(model)

    assert_same_as_unsharded(layout, build_with_temperature, parallelize, pairs(), mean_square)


@pytest.mark.layouts(dp=(1, 2))
def test_a_wrong_parameter_without_dims_is_named(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.scale"])
        return DistributedDataParallel(model)

    with pytest.raises(AssertionError, match=r"gradient of `3\.scale` equals the reference after .* over dp"):
        assert_same_as_unsharded(layout, build_with_temperature, parallelize, pairs(), mean_square)


@pytest.mark.layouts(dp=(1, 2))
def test_a_declared_partial_gradient_is_reduced_and_noted(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        from torch.distributed.tensor import DTensor, Replicate

        whole = nn.Parameter(DTensor.from_local(model.scale.detach(), layout.mesh, [Replicate()]))
        model.scale = whole
        plain = DTensor.to_local
        model.forward = lambda x: x * plain(whole, grad_placements=[Partial("avg")])
        return model

    notes = assert_same_as_unsharded(layout, Scale, parallelize, pairs(), mean_square)
    assert notes == ["gradient of `scale` is (Partial(avg),): reduced here, as it declares"]


class Rotation(nn.Module):
    """A rotary embedding with a complex cache, which `Module.to(torch.float64)` would make real."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 6, dtype=torch.float64)
        angles = torch.arange(3, dtype=torch.float64)
        self.register_buffer("cache", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (3, 2)))
        return x + torch.view_as_real(pairs * self.cache).flatten(-2)


@pytest.mark.layouts(dp=(1, 2))
def test_a_complex_buffer_stays_complex(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        assert model.cache.is_complex()
        return fully_shard(model, mesh=layout.mesh)

    assert_same_as_unsharded(layout, Rotation, parallelize, pairs(), mean_square)


def balance(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An auxiliary loss that is no sum over rows."""
    return model(batch["x"]).mean(0).square().sum()


def loss_by_parts(
    model: nn.Module, batch: dict[str, torch.Tensor], parts: tuple[dict[str, torch.Tensor], ...]
) -> torch.Tensor:
    return mean_square(model, batch) + sum(balance(model, each) for each in parts) / len(parts)


def loss_of_whole(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return mean_square(model, batch) + balance(model, batch)


class Balanced:
    """A plan over dp that balances each of its microbatches alone."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
        mine = {name: self.layout.slice(each, "dp") for name, each in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(mine["x"].chunk(microbatches), mine["y"].chunk(microbatches), strict=True):
            part = loss_of_whole(self.model, {"x": x, "y": y}) / microbatches / self.layout["dp"]
            part.backward()
            total += part.detach()
        for each in (total, *(each.grad for each in self.model.parameters())):
            dist.all_reduce(each)
        return total


class Checkpointed(nn.Sequential):
    """Layers that are computed again in backward, which such checkpoints allow to `.backward()` alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self:
            x = checkpoint(each, x, use_reentrant=True)
        return x


def build_checkpointed() -> nn.Sequential:
    return Checkpointed(*build_mlps())


@pytest.mark.layouts(dp=(2,))
def test_reentrant_checkpoints_hold(layout: Layout) -> None:
    batches = [{**each, "x": each["x"].requires_grad_()} for each in pairs()]
    assert_same_as_unsharded(layout, build_checkpointed, Balanced, batches, loss_by_parts)


@pytest.mark.layouts(dp=(1, 2, 4), at_most=4)
def test_a_loss_by_the_same_parts_holds(layout: Layout) -> None:
    assert_same_as_unsharded(layout, build_mlps, Balanced, pairs(), loss_by_parts)
    with pytest.raises(AssertionError, match="is not the unsharded model"):
        assert_same_as_unsharded(layout, build_mlps, Balanced, pairs(), loss_of_whole)


THREADS: list[int] = []
THREADS_OF_A_GROUP = 3  # two that run collectives, and the loop of its sockets


@pytest.mark.parametrize("number", range(6))
@pytest.mark.layouts(fsdp=(2,), tp=(2,))
def test_no_thread_of_gloo_stays_behind(layout: Layout, number: int) -> None:
    """The two groups of a layout end with those of others; those of five more would be too many threads."""
    assert_same_as_unsharded(layout, build_even, shard_in_place, pairs(), mean_square)
    THREADS.append(len(os.listdir("/proc/self/task")))
    assert THREADS[-1] <= THREADS[0] + THREADS_OF_A_GROUP * MOST_WAITING
    # After which of them they end depends on how many of earlier tests wait.
    assert len(THREADS) < 6 or min(THREADS[1:]) <= THREADS[0]


@pytest.mark.layouts(dp=(1, 2), ep=(1, 2), at_most=4)
def test_what_a_plan_does_not_offer_is_skipped(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        raise NotOffered("dp alone")

    with pytest.raises(NotOffered, match="dp alone"):
        assert_same_as_unsharded(layout, build_mlps, parallelize, pairs(), mean_square)
