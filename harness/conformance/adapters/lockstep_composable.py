"""The adapter of the built-in engine's composable front. Inside a rank; imports torch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import harness.engine as engine
from harness.conformance.adapters.composed import Composed
from harness.conformance.adapters.lockstep import composable, traffic
from harness.conformance.interface import Composable, Group, Traffic
from harness.recorders import Collective

__all__ = ["LockstepComposable"]


class LockstepComposable(Composed):
    """`fully_shard` and `replicate` of the built-in engine."""

    name = "lockstep-composable"

    @property
    def composable(self) -> Composable:
        return composable()

    def groups(self, model: nn.Module) -> Sequence[Group]:
        return engine.groups(model)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        return traffic(log)

    def grad_scaler(self, model: nn.Module, **settings: Any) -> torch.amp.GradScaler:
        return engine.ShardedGradScaler(**settings)
