"""Right plans hold: by hand, with DTensor, FSDP2, our engine and stages; and what they read of the layout."""

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
from lockstep.layouts import Layout, NotOffered, Sharded, ShardMap, assert_same_as_unsharded, witness_batches
from lockstep.layouts.shards import take
from suites.selftest.layouts.model import (
    SHARDS,
    VOCAB,
    Gathered,
    OnPaper,
    PlanWithNorm,
    Summed,
    SummedBackward,
    build,
    loss,
)

BATCHES = witness_batches(VOCAB)


@pytest.mark.layouts(dp=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plans_by_hand_hold(layout: Layout) -> None:
    notes = assert_same_as_unsharded(layout, build, PlanWithNorm, BATCHES, loss, shards=SHARDS)
    assert notes == []


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, inner)
        self.down = nn.Linear(inner, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


def build_mlps(inner: int = 5) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Mlp(inner), Mlp(inner), Mlp(inner)).double()


def build_even() -> nn.Sequential:
    """Return what RowwiseParallel can cut: torch 2.13 has no uneven parts there."""
    return build_mlps(6)


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


def mean_square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def pairs(steps: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randn(24, 6, generator=generator, dtype=torch.float64) for name in "xy"}
        for _ in range(steps)
    ]


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


class Stage:
    """A pipeline by hand: each rank numbers its blocks from 0, and has its gradients in `main_grad`."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        self.layout, self.at, self.bug = layout, layout.at("pp"), bug
        blocks = list(model.children())
        self.model = nn.Sequential(*(blocks[:2] if self.at == 0 else blocks[2:]))
        for each in self.model.parameters():
            each.main_grad = torch.zeros_like(each)

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor | None:
        for each in self.model.parameters():
            each.main_grad.zero_()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(batch["x"].chunk(microbatches), batch["y"].chunk(microbatches), strict=True):
            if self.at == 0:
                sent = self.model(x)
                gradient = torch.empty_like(sent)
                dist.send(sent.detach(), 1)
                dist.recv(gradient, 1)
                sent.backward(gradient)
            else:
                received = torch.empty_like(x)
                dist.recv(received, 0)
                part = (self.model(received.requires_grad_()) - y).square().mean()
                part = part if self.bug == "sum" else part / microbatches
                part.backward()
                total += part.detach()
                dist.send(received.grad, 0)
        for each in self.model.parameters():
            each.main_grad.add_(each.grad)
        return total if self.at else None


def name_of_stage(name: str, layout: Layout) -> str:
    number, _, rest = name.partition(".")
    return f"{int(number) + 2 * layout.at('pp')}.{rest}"


STAGES = ShardMap(
    rename=name_of_stage,
    gradients=lambda model: {name: each.main_grad for name, each in model.named_parameters()},
)


@pytest.mark.layouts(pp=(1, 2))
def test_stages_that_number_layers_from_0_hold(layout: Layout) -> None:
    assert_same_as_unsharded(layout, build_mlps, Stage, pairs(), mean_square, shards=STAGES)


@pytest.mark.layouts(pp=(1, 2))
def test_a_bug_in_stages_is_named(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> Stage:
        return Stage(model, layout, "sum")

    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(layout, build_mlps, parallelize, pairs(), mean_square, shards=STAGES)
    title, first, loss_line, *_ = str(caught.value).splitlines()
    assert title == "pp2 is not the unsharded model (step 1):"
    times = "3 times the reference: multiplied by the number of microbatches (3) once too often"
    assert first == f"  gradient of `2.down.bias` (and 11 more of 12) is {times}"
    assert loss_line.startswith(f"  loss is {times} (")


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.block = Mlp(5)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


class TiedStages:
    """A pipeline of which the first stage has no more than the embedding, and the second none of its own."""

    def __init__(self, model: Tied, layout: Layout) -> None:
        self.at = layout.at("pp")
        if self.at:
            del model.embed
        else:
            del model.block, model.head
        self.model = model

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor | None:
        total, count = torch.zeros((), dtype=torch.float64), (batch["labels"] >= 0).sum()
        parts = zip(batch["tokens"].chunk(microbatches), batch["labels"].chunk(microbatches), strict=True)
        for tokens, labels in parts:
            if self.at == 0:
                sent = self.model.embed(tokens)
                gradient = torch.empty_like(sent)
                dist.send(sent.detach(), 1)
                dist.recv(gradient, 1)
                sent.backward(gradient)
                continue
            received = torch.empty(*tokens.shape, 6, dtype=torch.float64)
            dist.recv(received, 0)
            logits = self.model.head(self.model.block(received.requires_grad_())).flatten(0, 1)
            part = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
            part.backward()
            total += part.detach()
            dist.send(received.grad, 0)
        tied = self.model.head if self.at else self.model.embed
        self.reduce(tied.weight.grad)
        return total if self.at else None

    def reduce(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)


def build_tied() -> Tied:
    torch.manual_seed(5)
    return Tied()


@pytest.mark.layouts(pp=(1, 2))
def test_a_tied_parameter_has_both_names(layout: Layout) -> None:
    shards = ShardMap({"embed.*": Sharded("tp"), "head.*": Sharded("tp")})
    assert_same_as_unsharded(layout, build_tied, TiedStages, BATCHES, loss, shards=shards)


@pytest.mark.layouts(pp=(1, 2))
def test_a_tied_gradient_that_is_not_reduced_over_stages_is_named(layout: Layout) -> None:
    class Unreduced(TiedStages):
        def reduce(self, gradient: torch.Tensor) -> None:
            pass

    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(layout, build_tied, Unreduced, BATCHES, loss)
    sentence = (
        "gradient of `embed.weight` equals the reference after a sum over pp: that reduction is missing"
    )
    assert sentence in str(caught.value).splitlines()[1]


class LastStageEmpty(Stage):
    """A pipeline with all blocks in the first stage, so that the second has no parameters."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        super().__init__(model, layout, bug)
        self.model = nn.Sequential() if self.at else nn.Sequential(*build_mlps().children())
        for each in self.model.parameters():
            each.main_grad = torch.zeros_like(each)


@pytest.mark.layouts(pp=(1, 2))
def test_a_stage_without_parameters_holds(layout: Layout) -> None:
    arguments = (layout, build_mlps, LastStageEmpty, pairs(), mean_square)
    assert_same_as_unsharded(*arguments, shards=ShardMap(gradients=STAGES.gradients))


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


@pytest.mark.layouts(dp=(1, 2, 4), at_most=4)
def test_a_loss_by_the_same_parts_holds(layout: Layout) -> None:
    assert_same_as_unsharded(layout, build_mlps, Balanced, pairs(), loss_by_parts)
    with pytest.raises(AssertionError, match="is not the unsharded model"):
        assert_same_as_unsharded(layout, build_mlps, Balanced, pairs(), loss_of_whole)


@pytest.mark.layouts(tp=(1, 2), ep=(1, 2), at_most=4)
def test_a_layout_says_sizes_places_and_parts(layout: Layout) -> None:
    assert (layout["dp"], layout.at("dp")) == (1, 0)
    assert layout.part(("tp", "ep")) == (layout.rank, dist.get_world_size())
    whole = torch.arange(5)
    assert (
        torch.cat([whole[:3], whole[3:]][layout.at("tp") :][:1]).equal(layout.slice(whole, "tp"))
        or layout["tp"] == 1
    )
    with pytest.raises(ValueError, match=r"of size 1 in .*, where there is no group"):
        layout.group("dp")
    with pytest.raises(KeyError, match="this layout has the axes tp, ep, pp, dp, fsdp, cp"):
        layout["sp"]
    assert dist.get_world_size(layout.group("tp", "ep")) == layout["tp"] * layout["ep"]


def test_a_layout_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="dp2-tp2 has 4 ranks, this world 1"):
        Layout({"dp": 2, "tp": 2})
    layout = Layout({"dp": 1})
    with pytest.raises(KeyError, match="'sp': this layout has the axes dp, "):
        layout.group("sp")
    with pytest.raises(RuntimeError, match="one rank: the layout has no mesh, or has ended"):
        layout.mesh  # noqa: B018


@pytest.mark.layouts(dp=(2,), cp=(2,), tp=(2,))
def test_a_group_of_two_axes_is_made_where_it_is_used(layout: Layout) -> None:
    if layout.at("dp") == 0:
        value = torch.tensor([layout.rank])
        dist.all_reduce(value, group=layout.group("cp", "tp"))
        assert value.item() == 6


@pytest.mark.parametrize("number", range(3))
@pytest.mark.layouts(cp=(2,), tp=(2,))
def test_a_layout_that_is_not_used_ends_on_all_ranks(layout: Layout, number: int) -> None:
    """Ranks that ended its groups at once broke those that were still connecting."""
    assert layout.mesh.size() == 4


THREADS: list[int] = []


@pytest.mark.parametrize("number", range(3))
@pytest.mark.layouts(fsdp=(2,), tp=(2,))
def test_no_thread_of_gloo_stays_behind(layout: Layout, number: int) -> None:
    assert_same_as_unsharded(layout, build_even, shard_in_place, pairs(), mean_square)
    THREADS.append(len(os.listdir("/proc/self/task")))
    assert THREADS[-1] <= THREADS[0]


@pytest.mark.layouts(dp=(1, 2), ep=(1, 2), at_most=4)
def test_what_a_plan_does_not_offer_is_skipped(layout: Layout) -> None:
    def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
        raise NotOffered("dp alone")

    with pytest.raises(NotOffered, match="dp alone"):
        assert_same_as_unsharded(layout, build_mlps, parallelize, pairs(), mean_square)


@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        (Sharded("tp"), [[0, 1, 2], [3, 4]]),
        (Sharded("tp", padded=True), [[0, 1, 2], [3, 4, -1]]),
        (Sharded("tp", parts=(2, 3)), [[0, 2, 3], [1, 4]]),
        (Sharded("tp", rows=lambda length, count, index: range(index, length, count)), [[0, 2, 4], [1, 3]]),
    ],
    ids=["chunks", "padded", "packed", "interleaved"],
)
def test_the_rows_of_a_part_are_what_the_cut_says(cut: Sharded, parts: list[list[int]]) -> None:
    assert [cut.indices(5, index, 2).tolist() for index in range(2)] == parts


def test_rows_of_padding_are_zero_in_a_part() -> None:
    shards, whole = ShardMap({"w": Sharded("tp", padded=True)}), torch.arange(1.0, 7.0).view(3, 2)
    parts = [shards.region("w", whole.shape, OnPaper(tp=2), rank) for rank in range(2)]
    assert parts[1].tolist() == [[4, 5], [-1, -1]]
    assert [take(whole, part).tolist() for part in parts] == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]


def test_buffers_of_one_shape_are_those_of_the_unsharded_model() -> None:
    whole, own = nn.Module(), nn.Module()
    for model, value in ((whole, 1.0), (own, 0.0)):
        model.register_buffer("mean", torch.full((3,), value))
        model.register_buffer("cache", torch.full((4 - int(value),), value))
    ShardMap().write(own, whole, OnPaper(tp=2))
    assert {name: each.tolist() for name, each in own.named_buffers()} == {
        "mean": [1.0] * 3,
        "cache": [0.0] * 4,
    }


@pytest.mark.layouts(pp=(2,))
def test_a_stage_may_hold_a_tied_weight_under_its_second_name(layout: Layout) -> None:
    whole = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    whole["head"].weight = whole["embedding"].weight
    name = ("embedding", "head")[layout.at("pp")]
    own = nn.ModuleDict({name: nn.Embedding(4, 3) if name == "embedding" else nn.Linear(3, 4, bias=False)})
    ShardMap().write(own, whole, layout)
    assert torch.equal(own[name].weight, whole["embedding"].weight)
