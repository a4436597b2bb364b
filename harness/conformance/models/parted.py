"""A small model that a layout cuts by hand over pp, ep, cp and tp, for engines that are one more axis.

Imports torch, and of harness `layouts` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.layouts import Layout, Sharded, ShardMap

_VOCABULARY, _WIDTH, _INNER, _EXPERTS = 11, 6, 7, 6

SHARDS = ShardMap(
    {
        "*.up.*": Sharded("tp"),  # 4 and 3 of the 7 inner features
        "*.down.weight": Sharded("tp", dim=1),
        "*.experts.weight": Sharded("ep"),
    }
)


class _Both(torch.autograd.Function):
    """One function in forward, another one of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], other: Any) -> Tensor:
        ctx.of_gradient = other
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.of_gradient(gradients[0]), None, None


def _both(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    done: Tensor = _Both.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return done


@dataclass(frozen=True)
class Cuts:
    """Operations of the model in a layout.

    Attributes:
        layout: None is one rank.
        by_hand: axes that cut the batch, over which the model itself sums gradients.
        share: of the gradients of experts that counts, where their engine averages over fewer ranks.
    """

    layout: Layout | None = None
    by_hand: tuple[str, ...] = ()
    share: float = 1.0

    def at(self, axis: str) -> tuple[int, int]:
        """Return this rank's place on an axis, and its size."""
        return (0, 1) if self.layout is None else self.layout.part(axis)

    def sum(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        if axes := tuple(axis for axis in axes if self.at(axis)[1] > 1):
            assert self.layout is not None, "it has the axes"
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=self.layout.group(*axes))
        return x.view_as(x)

    def gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Put the equal parts of all ranks of an axis together."""
        index, count = self.at(axis)
        parts = [torch.zeros_like(x) for _ in range(count)]
        parts[index] = x
        return self.sum(torch.cat(parts, dim), (axis,))

    def part(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Sum over an axis, of which each rank keeps its part."""
        index, count = self.at(axis)
        return self.sum(x, (axis,)).chunk(count, dim)[index].clone()

    def weight(self, parameter: Tensor, *cut_over: str) -> Tensor:
        """Return a parameter whose gradient is summed over the axes by hand that do not cut it."""
        axes = tuple(axis for axis in self.by_hand if axis not in cut_over)
        return _both(parameter, lambda x: x.view_as(x), lambda gradient: self.sum(gradient, axes))

    def enter(self, x: Tensor) -> Tensor:
        return _both(x, lambda x: x.view_as(x), lambda gradient: self.sum(gradient, ("tp",)))

    def leave(self, x: Tensor) -> Tensor:
        return _both(x, lambda x: self.sum(x, ("tp",)), lambda gradient: gradient)

    def gathered(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return _both(x, lambda x: self.gather(x, axis, dim), lambda gradient: self.part(gradient, axis, dim))

    def parted(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return _both(x, lambda x: self.part(x, axis, dim), lambda gradient: self.gather(gradient, axis, dim))


class _Experts(nn.Module):
    """Each token goes to the expert that is the number of its largest feature."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = Cuts()
        self.weight = nn.Parameter(torch.randn(_EXPERTS, _WIDTH, _WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.cuts.gathered(x, "ep", 0)
        chosen = tokens.detach().argmax(-1, keepdim=True)
        weight = self.cuts.weight(self.weight, "ep")
        weight = weight * self.cuts.share + weight.detach() * (1 - self.cuts.share)
        first = self.cuts.at("ep")[0] * len(weight)
        done = [(chosen == first + number) * (tokens @ each) for number, each in enumerate(weight)]
        return self.cuts.parted(torch.stack(done).sum(0), "ep", 0)


class _Block(nn.Module):
    """Causal attention of a norm to itself, an MLP, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = Cuts()
        self.scale = nn.Parameter(torch.full((1,), 0.7))  # one element: of two shards one is empty
        self.norm = nn.RMSNorm(_WIDTH, eps=1e-6)
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)
        self.experts = _Experts()

    def forward(self, x: Tensor) -> Tensor:
        cuts, weight = self.cuts, self.cuts.weight
        x = F.rms_norm(x, (_WIDTH,), weight(self.norm.weight), 1e-6)
        keys = cuts.gathered(x, "cp", 1)
        places = torch.arange(x.shape[1], device=x.device)[:, None] + cuts.at("cp")[0] * x.shape[1]
        later = torch.arange(keys.shape[1], device=x.device) > places
        scores = F.linear(x, weight(self.query.weight)) @ keys.mT
        x = x + weight(self.scale) * scores.masked_fill(later, float("-inf")).softmax(-1) @ keys
        hidden = F.silu(F.linear(cuts.enter(x), weight(self.up.weight), weight(self.up.bias)))
        x = x + cuts.leave(F.linear(hidden, weight(self.down.weight)))
        done: Tensor = x + self.experts(x)
        return done


class PartedModel(nn.Module):
    """An embedding, two blocks and a head; `cut` leaves what one rank of a layout has of it.

    Most sizes cannot be divided by the ranks of an axis: 11 words, 7 inner features, one scale.
    """

    units: ClassVar[tuple[str, ...]] = ("blocks.0", "blocks.1")
    embed: nn.Embedding | None
    head: nn.Linear | None

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.cuts = Cuts()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleDict({"0": _Block(), "1": _Block()})
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = F.embedding(x, self.cuts.weight(self.embed.weight))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else F.linear(x, self.cuts.weight(self.head.weight))

    def cut(self, cuts: Cuts) -> None:
        """Leave this rank's stage, and its part of each parameter."""
        assert cuts.layout is not None, "a layout to cut by"
        for module in self.modules():
            if isinstance(module, _Experts | _Block | PartedModel):
                module.cuts = cuts
        for name, parameter in self.named_parameters():
            parameter.data = SHARDS.cut(name, parameter, cuts.layout)
        stage, stages = cuts.at("pp")
        if stages > 1:
            del self.blocks[str(1 - stage)]
            if stage:
                self.embed = None
            else:
                self.head = None


def build(is_tied: bool = False, frozen: str = "") -> PartedModel:
    """Return the unsharded model; the parameters of the module `frozen` do not learn."""
    torch.manual_seed(6)  # with this one each expert has tokens
    model = PartedModel(is_tied).double()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    return model


def build_tied() -> PartedModel:
    return build(is_tied=True)


def build_frozen() -> PartedModel:
    return build(frozen="blocks.0.experts")


def share(logits: Tensor, labels: Tensor, whole: Mapping[str, Tensor]) -> Tensor:
    """Return what a part of a batch adds to the loss of the whole one."""
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return entropy / (whole["labels"] >= 0).sum()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over all tokens that have a label."""
    return share(model(batch["tokens"]), batch["labels"], batch)
