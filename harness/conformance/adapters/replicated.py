"""A base for adapters of engines that shard nothing. Inside a rank; imports torch."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from harness.conformance.capabilities import Capability, NotOffered, require
from harness.conformance.interface import Composable, Traffic
from harness.conformance.spec import ShardSpec, required_capabilities
from harness.engine import GroupInfo
from harness.recorders import Collective


class Replicated:
    """An engine whose ranks each hold the whole model, in plain tensors under their own names.

    A subclass has a `name` and a method `shard`, which begins with `check`. Everything else is here: it
    follows from whole parameters, or is not offered. What a subclass offers beyond that it adds to
    `capabilities`, and overrides the method.
    """

    name: str
    capabilities: frozenset[Capability] = frozenset({Capability.PLAIN_PARAMETERS})

    def __repr__(self) -> str:
        return self.name

    def check(self, spec: ShardSpec) -> None:
        """Raise `NotOffered` if `spec` asks for what is not among the capabilities."""
        require(self, *required_capabilities(spec))

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} has no method `shard`")

    def unwrapped(self, model: nn.Module) -> nn.Module:
        return model

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.unwrapped(model).named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        gradients = {name: p.grad for name, p in self.unwrapped(model).named_parameters()}
        # One that is sparse stands for all of its elements, too.
        return {n: None if g is None else g.detach().to_dense().clone() for n, g in gradients.items()}

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self.unwrapped(model).state_dict()

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def grad_scaler(
        self, model: nn.Module, *, process_group: object = None, **settings: Any
    ) -> torch.amp.GradScaler:
        # Gradients are the same on all ranks, and so is what a scaler finds in them.
        return torch.amp.GradScaler(next(model.parameters()).device.type, **settings)

    # Not offered

    @property
    def composable(self) -> Composable:
        raise NotOffered(self.name, Capability.COMPOSABLE)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        raise NotOffered(self.name, Capability.UNSYNCED_GRADIENTS)

    def groups(self, model: nn.Module) -> Sequence[GroupInfo]:
        raise NotOffered(self.name, Capability.GROUPS)

    def pre_backward_hooks(self, output: Tensor) -> int:
        raise NotOffered(self.name, Capability.HOOKS)

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        raise NotOffered(self.name, Capability.SUMMON)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        raise NotOffered(self.name, Capability.TRAFFIC)
