"""Tensors inside the arguments and results of a forward. Imports torch only."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``fn`` applied to each tensor in nested containers, dataclasses included."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=fn(leaf.data))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(
                leaf, **{name: map_tensors(fn, getattr(leaf, name)) for name in fields}
            )
        return leaf

    return pytree.tree_map(visit, tree)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in ``tree``, in the order that `map_tensors` visits them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def cast_floating(dtype: torch.dtype, tree: Any) -> Any:
    """Return ``tree`` with its floating-point tensors in ``dtype``; autograd casts gradients back."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
