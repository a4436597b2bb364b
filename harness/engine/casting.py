"""Casts of what goes through a unit: tensors in arguments and results, and buffers. Runs on ranks."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from harness.engine.parameters import Slot

Parts = Mapping[Any, Any]


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``fn`` applied to each tensor in nested containers, dataclasses included.

    A container in which something changed comes back as a copy; all else is the same object as before.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    parts, rebuild = _opened(tree)
    mapped = {key: map_tensors(fn, part) for key, part in parts.items()}
    return tree if all(mapped[key] is part for key, part in parts.items()) else rebuild(mapped)


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


def _opened(tree: Any) -> tuple[Parts, Callable[[Parts], Any]]:
    """Return what ``tree`` holds, which is nothing if it is no container, and what makes another of it."""
    if fields := getattr(tree, "_fields", ()) if isinstance(tree, tuple) else ():
        # The sizes of a packed sequence stay on CPU.
        skipped = "batch_sizes" if isinstance(tree, PackedSequence) else None
        named = _attributes(tree, (name for name in fields if name != skipped))
        return named, lambda parts: tree._replace(**parts)
    if not pytree.tree_is_leaf(tree):
        children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
        return dict(enumerate(children)), lambda parts: pytree.tree_unflatten(parts.values(), spec)
    # Dataclasses, and subclasses of the containers that torch looks into: it does not look into these.
    if isinstance(tree, dict | list):
        items = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
        return items, lambda parts: _copy_with(operator.setitem, tree, parts)
    if isinstance(tree, tuple):
        return dict(enumerate(tree)), lambda parts: type(tree)(parts.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        # Not by dataclasses.replace: it calls the constructor, which may take or make other fields.
        # object.__setattr__ sets those of a frozen one, too.
        named = _attributes(tree, (field.name for field in dataclasses.fields(tree)))
        return named, lambda parts: _copy_with(object.__setattr__, tree, parts)
    return {}, lambda _: tree


def _attributes(value: Any, names: Iterable[str]) -> Parts:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _copy_with(put: Callable[[Any, Any, Any], object], value: Any, parts: Parts) -> Any:
    copied = copy.copy(value)
    for key, part in parts.items():
        put(copied, key, part)
    return copied


class Buffers:
    """Cast what lies in ``slots``, by name within the unit's module.

    ``dtypes``: those that cast buffers had before and are saved in. With ``goes_back`` the values are kept as
    well: a buffer that nobody changed meanwhile goes back to every bit it had, and not to rounded values.
    """

    def __init__(self, slots: Mapping[str, Slot], goes_back: bool) -> None:
        self.dtypes: dict[str, torch.dtype] = {}
        self._slots = dict(slots)
        self._goes_back = goes_back
        self._values: dict[str, Tensor] = {}

    def prepare(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        """Let modules see floating-point buffers in ``dtype``, or as they were; all of them on ``device``."""
        if not self._slots:
            return
        # A tensor made in inference mode could not be written to in training.
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self._slots.items():
                buffer = slot.module._buffers.get(slot.name)
                if buffer is not None:
                    buffer = self._cast(name, buffer, dtype) if buffer.is_floating_point() else buffer
                    slot.module._buffers[slot.name] = buffer.to(device or buffer.device)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow a cast of the module."""
        self.dtypes = {name: fn(torch.empty(0, dtype=dtype)).dtype for name, dtype in self.dtypes.items()}

    def _cast(self, name: str, buffer: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype and buffer.dtype != dtype:
            self.dtypes[name] = buffer.dtype
            if self._goes_back:
                self._values[name] = buffer
            return buffer.to(dtype)
        return buffer if dtype else self._restore(name, buffer)

    def _restore(self, name: str, buffer: Tensor) -> Tensor:
        value = self._values.pop(name, None)
        if value is not None and torch.equal(value.to(buffer.device, buffer.dtype), buffer):
            buffer = value.to(buffer.device)  # from where it was before a move of the module
        return buffer.to(self.dtypes.get(name, buffer.dtype))
