"""The base of adapters: what follows from the rest, or is not offered. Inside a rank; imports torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.assertions.parity import MakeOptimizer
from lockstep.conformance.capabilities import Capability, NotOffered, require
from lockstep.conformance.interface import Composable, StateDicts, Traffic, Wrapper
from lockstep.conformance.spec import ShardSpec, required_capabilities
from lockstep.engine import GroupInfo
from lockstep.recorders import Collective


class Adapter(ABC):
    """An engine of which a subclass writes what it has: `name`, `capabilities`, and three methods at least.

    These are `shard`, which begins with `check`, `full_parameters` and `full_gradients`. Whatever else a
    subclass offers it adds to `capabilities`, and overrides the method.
    """

    name: str
    capabilities: frozenset[Capability] = frozenset()

    def __repr__(self) -> str:
        return self.name

    def check(self, spec: ShardSpec) -> None:
        """Raise `NotOffered` if `spec` asks for what is not among the capabilities."""
        require(self, *required_capabilities(spec))

    @abstractmethod
    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module: ...

    @abstractmethod
    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]: ...

    @abstractmethod
    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]: ...

    # Overridden where the engine does it in another way

    def unwrapped(self, model: nn.Module) -> nn.Module:
        return model

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        bare = self.unwrapped(model)
        buffers = {name for name, _ in bare.named_buffers(remove_duplicate=False)}
        saved = {name: tensor for name, tensor in bare.state_dict().items() if name in buffers}
        return {**self.full_parameters(model), **saved}

    def backward(self, model: nn.Module, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def optimizer(self, model: nn.Module, make: MakeOptimizer) -> Optimizer:
        return make(model.parameters())

    # Not offered

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        raise NotOffered(self.name, Capability.CLIPPING)

    def grad_scaler(self, model: nn.Module, **settings: Any) -> torch.amp.GradScaler:
        raise NotOffered(self.name, Capability.GRAD_SCALER)

    @property
    def composable(self) -> Composable:
        raise NotOffered(self.name, Capability.COMPOSABLE)

    @property
    def wrapper(self) -> Wrapper:
        raise NotOffered(self.name, Capability.WRAPPER)

    @property
    def state_dicts(self) -> StateDicts:
        raise NotOffered(self.name, Capability.STATE_DICTS)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        raise NotOffered(self.name, Capability.NO_SYNC)

    def groups(self, model: nn.Module) -> Sequence[GroupInfo]:
        raise NotOffered(self.name, Capability.GROUPS)

    def pre_backward_hooks(self, output: Tensor) -> int:
        raise NotOffered(self.name, Capability.HOOKS)

    def summon(
        self, model: nn.Module, writeback: bool = False, with_grads: bool = False
    ) -> AbstractContextManager[None]:
        raise NotOffered(self.name, Capability.SUMMON)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        raise NotOffered(self.name, Capability.TRAFFIC)
