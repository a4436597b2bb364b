"""The adapter of the built-in engine: its wrapper front, and beside it the composable one. Inside a rank."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import harness.engine as lockstep
from harness.conformance.adapters.wrapped import Wrapped, WrapperFront
from harness.conformance.capabilities import Capability
from harness.conformance.interface import Composable, Group, Traffic
from harness.conformance.spec import ShardSpec
from harness.engine.collectives import GATHER, REDUCE, SPREAD, WRAP
from harness.recorders import Collective

__all__ = ["Lockstep", "composable", "traffic"]


class Lockstep(Wrapped):
    """The built-in engine: its wrapper front, and beside it the composable one."""

    name = "lockstep"
    front = WrapperFront(
        lockstep.FullyShardedDataParallel,
        lockstep.ShardingStrategy,
        lockstep.BackwardPrefetch,
        lockstep.CPUOffload,
        lockstep.MixedPrecision,
        lockstep.CustomPolicy,
        lockstep.size_based_auto_wrap_policy,
    )
    capabilities = frozenset(Capability)

    @property
    def composable(self) -> Composable:
        return composable()

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        full_precision = spec.full_precision_in_eval
        return self.wrap(model, spec, device_id=spec.device, full_precision_in_eval=full_precision)

    def groups(self, model: nn.Module) -> Sequence[Group]:
        return lockstep.groups(model)

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        with self.summon(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        with self.summon(model, with_grads=True):
            return {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        return traffic(log)

    def grad_scaler(self, model: nn.Module, **settings: Any) -> torch.amp.GradScaler:
        return lockstep.ShardedGradScaler(**settings)


def composable() -> Composable:
    """Return the built-in engine's composable front."""
    return Composable(
        lockstep.fully_shard,
        lockstep.replicate,
        lockstep.MixedPrecisionPolicy,
        lockstep.OffloadPolicy,
        lockstep.CPUOffloadPolicy,
        lockstep.FSDPModule,
        lockstep.register_fsdp_forward_method,
    )


def traffic(log: Iterable[Collective]) -> Traffic:
    """Sort a log by what the built-in engine says each collective is for."""
    log = tuple(log)
    gathers = [entry for entry in log if entry.label == GATHER]
    reductions = [entry for entry in log if entry.label == REDUCE]
    # A sum in low precision is made piece by piece, and then spread: that is a part of its reduction.
    others = [entry for entry in log if entry.label not in (GATHER, REDUCE, SPREAD, WRAP)]
    return Traffic(tuple(gathers), tuple(reductions), tuple(others))
