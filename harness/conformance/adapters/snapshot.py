"""A group as an adapter shows it that reads another engine's state. Inside a rank; imports torch."""

from dataclasses import dataclass

import torch

from harness.conformance.capabilities import Capability, NotOffered
from harness.engine import GroupState

__all__ = ["ShownGroup"]


@dataclass(frozen=True)
class ShownGroup:
    """A snapshot of a group; ``hooks`` and ``cast_bytes`` are None where the engine has no such thing."""

    engine: str
    name: str
    parameters: tuple[str, ...]
    state: GroupState
    original_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    flat_dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    local_numel: int
    full_numel: int
    padding: int
    local_bytes: int
    gathered_bytes: int
    training: bool
    hooks: tuple[int, ...] | None = None
    cast_bytes: int | None = None

    @property
    def post_backward_hooks(self) -> tuple[int, ...]:
        if self.hooks is None:
            raise NotOffered(self.engine, Capability.HOOKS)
        return self.hooks

    @property
    def low_precision_bytes(self) -> int:
        if self.cast_bytes is None:
            raise NotOffered(self.engine, Capability.GROUPS)
        return self.cast_bytes
