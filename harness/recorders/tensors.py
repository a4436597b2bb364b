"""The tensors that an argument holds, by name. Inside a rank; imports torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["flat_bytes", "is_dtensor", "local_part", "named_tensors", "short"]

Part = TypeVar("Part", torch.Tensor, torch.Tensor | None)


def named_tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclass instances, by dotted path.

    A tuple `(x, {"mask": m})` gives `0` and `1.mask`; a bare tensor gives `path`. Other objects are not
    searched.
    """
    if isinstance(value, torch.Tensor):
        return {path: value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, tuple | list):
        parts = {str(place): part for place, part in enumerate(value)}
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        found |= named_tensors(part, f"{path}.{name}" if path else name)
    return found


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; does not import DTensor's module, which takes 0.5 s, to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Part) -> Part:
    """Return this rank's shard of a DTensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in one dimension, or of a copy where it has gaps in memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous whatever its strides are, as the gradient of a sum is.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def short(dtype: torch.dtype) -> str:
    """Return the dtype's name without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
