"""Right plans of pipelines hold, with tied parameters too, and a bug in one is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.layouts import Layout, Sharded, ShardMap, assert_same_as_unsharded
from suites.selftest.layouts.mlps import BATCHES, Mlp, build_mlps, mean_square, pairs
from suites.selftest.layouts.model import VOCAB, loss


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


@pytest.mark.layouts(pp=(2,))
def test_a_stage_may_hold_a_tied_weight_under_its_second_name(layout: Layout) -> None:
    whole = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    whole["head"].weight = whole["embedding"].weight
    name = ("embedding", "head")[layout.at("pp")]
    own = nn.ModuleDict({name: nn.Embedding(4, 3) if name == "embedding" else nn.Linear(3, 4, bias=False)})
    ShardMap().write(own, whole, layout)
    assert torch.equal(own[name].weight, whole["embedding"].weight)
