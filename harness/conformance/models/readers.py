"""Models that read a weight outside its unit, each in another place. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Reader(nn.Module):
    """A token embedding with a weight that `read` reads too; it is a unit below the root, as are two layers.

    `read`: maps the model and token ids (any shape, int64) below 5 to what its forward returns.
    """

    units: ClassVar[tuple[str, ...]] = ("wte", "mlp")

    def __init__(self, read: Callable[[Reader, Tensor], Tensor], frozen: bool = False) -> None:
        super().__init__()
        self.wte, self.mlp, self.own = TiedEmbedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = TiedHead()
        self.wte.requires_grad_(not frozen)
        self.read = read

    def body(self, tokens: Tensor) -> Tensor:
        """Map token ids to (..., 4)."""
        output: Tensor = self.own(self.mlp(self.wte(tokens)))
        return output

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(self, tokens)


class TiedEmbedding(nn.Embedding):
    """An embedding that has the head, too, in a method of its own."""

    def attend(self, hidden: Tensor) -> Tensor:
        """Return the product of `hidden` and each row of the weight."""
        return F.linear(hidden, self.weight)


class TiedHead(nn.Module):
    """A head without a weight of its own."""

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the product of `hidden` and each row of `weight`."""
        return F.linear(hidden, weight).square()


def tied_head(model: Reader, tokens: Tensor) -> Tensor:
    return F.linear(model.body(tokens), model.wte.weight)


def tied_head_by_call(model: Reader, tokens: Tensor) -> Tensor:
    output: Tensor = model.head(model.body(tokens), model.wte.weight)
    return output


def tied_head_by_method(model: Reader, tokens: Tensor) -> Tensor:
    return model.wte.attend(model.body(tokens))


def decay_term(model: Reader, tokens: Tensor) -> Tensor:
    return model.body(tokens).square() + model.wte.weight.square().sum()


def decay_term_of_all(model: Reader, tokens: Tensor) -> Tensor:
    output = model.body(tokens).square()
    return output + torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def detached(model: Reader, tokens: Tensor) -> Tensor:
    return F.linear(model.body(tokens), model.wte.weight.detach())


def between_two_calls(model: Reader, tokens: Tensor) -> Tensor:
    hidden = F.linear(model.wte(tokens), model.wte.weight).sum(-1, keepdim=True)
    output: Tensor = model.own(model.mlp(hidden * model.wte(tokens)))
    return output


def checkpointed(model: Reader, tokens: Tensor, use_reentrant: bool = False) -> Tensor:
    def head(hidden: Tensor) -> Tensor:
        return F.linear(hidden, model.wte.weight).square()

    output: Tensor = checkpoint(head, model.body(tokens), use_reentrant=use_reentrant)
    return output


def checkpointed_reentrant(model: Reader, tokens: Tensor) -> Tensor:
    return checkpointed(model, tokens, use_reentrant=True)


def checkpointed_with_the_unit(model: Reader, tokens: Tensor) -> Tensor:
    def both(start: Tensor) -> Tensor:
        return F.linear(model.mlp(model.wte(tokens) + start), model.wte.weight)

    output: Tensor = checkpoint(both, model.own.weight.sum(), use_reentrant=False)
    return output


def in_a_hook(model: Reader, tokens: Tensor) -> Tensor:
    def scaled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output * model.wte.weight.mean()

    handle = model.mlp.register_forward_hook(scaled)
    try:
        return model.body(tokens)
    finally:
        handle.remove()


def before_its_unit(model: Reader, tokens: Tensor) -> Tensor:
    factor = model.wte.weight.square().sum()
    return model.body(tokens) * factor


def detached_before_its_unit(model: Reader, tokens: Tensor) -> Tensor:
    head = F.linear(model.wte.weight.detach(), model.own.weight)
    return F.linear(model.body(tokens), head)


AFTER = (
    tied_head,
    tied_head_by_call,
    tied_head_by_method,
    decay_term,
    decay_term_of_all,
    detached,
    between_two_calls,
    checkpointed,
    checkpointed_reentrant,
    checkpointed_with_the_unit,
    in_a_hook,
)
"""Reads that come after the forward of the weight's unit, in that of the root."""

BEFORE = (before_its_unit, detached_before_its_unit)
"""Reads that come before it."""
