"""A language model of one block, and plans for it by hand over dp, tp and cp, each with places for bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.layouts import Layout, Sharded, ShardMap

VOCAB, WIDTH, HEADS = 17, 8, 4

SHARDS = ShardMap(
    {
        "qkv.weight": Sharded("tp", parts=(WIDTH, WIDTH, WIDTH)),
        "out.weight": Sharded("tp", dim=1),
        "up.*": Sharded("tp"),
        "down.weight": Sharded("tp", dim=1),
    }
)


class Block(nn.Module):
    """Causal attention and an MLP; `exchange` has what a plan does between its parts."""

    def __init__(self, cut: int = 1) -> None:
        super().__init__()
        self.heads, inner = HEADS // cut, WIDTH // cut
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * inner, bias=False)
        self.out = nn.Linear(inner, WIDTH)
        self.up = nn.Linear(WIDTH, 12 // cut)
        self.down = nn.Linear(12 // cut, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.enter_attention(self.norm(x))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(y).chunk(3, -1))
        k, v = self.gather(k), self.gather(v)
        late = torch.arange(k.shape[2]) > (torch.arange(q.shape[2]) + self.offset(q.shape[2]))[:, None]
        scores = (q @ k.transpose(2, 3)).masked_fill(late, float("-inf")).softmax(-1)
        mixed = F.linear((scores @ v).transpose(1, 2).flatten(2), self.out.weight)
        x = x + self.leave(mixed) + self.out.bias
        return x + self.leave(self.down(F.silu(self.up(self.enter(x)))))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    enter_attention = leave = gather = enter

    def offset(self, length: int) -> int:
        return 0


def build() -> Block:
    torch.manual_seed(1)
    model = Block()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
    return model


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def penalty(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An auxiliary term that is no sum over sequences."""
    return 0.1 * model.hidden(batch["tokens"]).mean((0, 1)).square().sum()


def loss_with_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) + penalty(model, batch)


class Summed(torch.autograd.Function):
    """A sum over a group in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class SummedBackward(torch.autograd.Function):
    """Nothing in forward, a sum over a group in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Gathered(torch.autograd.Function):
    """The concatenation along dim 2 in forward; in backward the sum over the group of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


class ShardedBlock(Block):
    """The block on tp ranks, each with some heads, and on cp ranks, each with a part of the sequence."""

    def __init__(self, layout: Layout, bug: str) -> None:
        super().__init__(layout["tp"])
        self.layout, self.bug = layout, bug

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout["tp"] == 1 or self.bug == "no sum backward":
            return x
        return SummedBackward.apply(x, self.layout.group("tp"))

    def enter_attention(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bug == "norm not reduced" else self.enter(x)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout["tp"] == 1 or self.bug == "no sum forward":
            return x
        if self.bug == "bias on each rank":
            x = x + self.out.bias / self.out.bias.numel()
        return Summed.apply(x, self.layout.group("tp"))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.layout["cp"] == 1 else Gathered.apply(x, self.layout.group("cp"))

    def offset(self, length: int) -> int:
        return self.layout.at("cp") * length


class OnPaper(Layout):
    """A layout without ranks."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self._large, self.asked, self.rank = sizes, sizes, set(), 0
        self.name, self._hosts = "on paper", ()


class Plan:
    """A trainer that is right, but for one bug."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        self.layout, self.bug = layout, bug
        self.model = ShardedBlock(layout, bug)
        SHARDS.write(self.model, model, layout)
        self.mutate()

    def mutate(self) -> None:
        """Change the model as a bug does."""
        with torch.no_grad():
            if self.bug == "packed weight cut whole":
                whole = build().qkv.weight
                self.model.qkv.weight.copy_(self.layout.slice(whole, "tp"))
            if self.bug == "float32 buffer":
                self.model.register_buffer("scale", torch.ones(1))
            if self.bug == "no bias":
                self.model.up.bias = None
            if self.bug == "renamed":
                self.model.bottom = nn.Linear(2, 2).double()

    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in ("dp", "cp") if self.layout[axis] > 1)

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
        self.kept = {name: each.grad for name, each in self.model.named_parameters()} and getattr(
            self, "kept", {}
        )
        mine = {
            name: self.layout.slice(self.layout.slice(each, "dp"), "cp", 1) for name, each in batch.items()
        }
        count: Any = (batch["labels"] >= 0).sum().double()
        if self.bug == "float32 scalar":
            count = float((1 / count).float()) ** -1
        if self.bug == "mean of means":
            count = (mine["labels"] >= 0).sum().clamp(min=1).double() * self.layout.part(("dp", "cp"))[1]
        total: Any = torch.zeros((), dtype=torch.float64)
        pairs = zip(mine["tokens"].chunk(microbatches), mine["labels"].chunk(microbatches), strict=True)
        for index, (tokens, labels) in enumerate(pairs):
            if self.bug == "mean of microbatches":
                whole = batch["labels"].chunk(self.layout["dp"])
                both = torch.stack([each.chunk(microbatches)[index] for each in whole])
                count = (both >= 0).sum().clamp(min=1).double() * microbatches
            part = (
                F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count
            )
            if self.bug == "last microbatch":
                self.model.zero_grad()
            if self.bug == "lost part" and self.layout.part(("dp", "cp"))[0] == 1:
                part = part * 0
            part.backward()
            total = total + part.detach()
        self.reduce()
        if self.axes() and self.bug != "loss not reduced":
            dist.all_reduce(total, group=self.layout.group(*self.axes()))
        return total

    def reduce(self) -> None:
        """Reduce gradients over dp and cp, right or wrong."""
        model, axes = self.model, self.axes()
        for name, each in model.named_parameters():
            if name.startswith("bottom"):
                continue
            if axes and self.bug != "not reduced" and not (self.bug == "head not reduced" and "head" in name):
                own = each.grad.clone()
                dist.all_reduce(each.grad, group=self.layout.group(*axes))
                if self.bug == "one replica" and self.layout.part(("dp", "cp"))[0]:
                    each.grad = own * own
            if self.bug == "divided":
                each.grad /= self.layout.part(("dp", "cp", "tp"))[1]
            if self.bug == "left in":
                each.grad += self.kept.get(name, 0)
                self.kept[name] = each.grad.clone()
            if self.bug == "not finite" and name == "head.bias" and self.layout.rank == 1:
                each.grad[3] = float("nan")
            if self.bug == "no gradient" and name == "head.bias":
                each.grad = None
            if self.bug == "reduced over what cuts" and name == "down.weight":
                dist.all_reduce(each.grad, group=self.layout.group("tp"))


class PlanWithNorm(Plan):
    """A plan that knows the total norm."""

    def grad_norm(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, each in self.model.named_parameters():
            if self.bug == "norm omits" and name == "embed.weight":
                continue
            square = each.grad.square().sum()
            if SHARDS.rule(name) and self.layout["tp"] > 1 and self.bug != "norm of this rank":
                dist.all_reduce(square, group=self.layout.group("tp"))
            elif self.bug == "norm counts replicas" and self.layout["tp"] > 1:
                square *= self.layout["tp"]
            total += square
        return total.sqrt()


class HeadUnreduced(PlanWithNorm):
    """A plan with a gradient that is not reduced over dp, or over tp in its place."""

    def reduce(self) -> None:
        own = self.model.head.weight.grad.clone()
        super().reduce()
        if self.bug == "over tp":
            torch.distributed.all_reduce(own, group=self.layout.group("tp"))
        self.model.head.weight.grad = own


class PlanWithPenalty(Plan):
    """A plan over dp of a loss with an auxiliary term, which it adds on rank 0 alone."""

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
        self.batch = batch
        found = super().__call__(batch, microbatches)
        return found + penalty(self.model, batch).detach()

    def reduce(self) -> None:
        if self.bug != "no penalty" and (self.layout.at("dp") == 0 or self.bug == "penalty on each rank"):
            penalty(self.model, self.batch).backward()
        super().reduce()


class PlanWithStep(Plan):
    """A plan with an optimizer of its own, that lacks a parameter."""

    def __init__(self, model: nn.Module, layout: Layout, bug: str = "") -> None:
        super().__init__(model, layout, bug)
        named = self.model.named_parameters()
        self.optimizer = torch.optim.SGD([each for name, each in named if name != "head.bias"], 0.01, 0.9)

    def step(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()


def plan_with(bug: str, kind: type[Plan] = Plan) -> Callable[[nn.Module, Layout], Plan]:
    """Return the `parallelize` of a plan with a bug."""
    return lambda model, layout: kind(model, layout, bug)
