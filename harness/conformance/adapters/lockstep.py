"""The adapters of the built-in engine's two fronts. Inside a rank; imports torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep import engine
from lockstep.conformance.adapters.composed import Composed
from lockstep.conformance.adapters.wrapped import Wrapped
from lockstep.conformance.capabilities import Capability
from lockstep.conformance.interface import Composable, StateDicts, Traffic, Wrapper
from lockstep.conformance.spec import ShardSpec
from lockstep.engine import state_dict
from lockstep.engine.collectives import GATHER, REDUCE, SPREAD, WRAP
from lockstep.engine.param import joined
from lockstep.engine.unit import Unit
from lockstep.recorders import Collective

T = TypeVar("T")


class _BuiltIn:
    """The part that the adapters of both fronts share."""

    @property
    def composable(self) -> Composable:
        return Composable(
            engine.fully_shard,
            engine.replicate,
            engine.MixedPrecisionPolicy,
            engine.OffloadPolicy,
            engine.CPUOffloadPolicy,
            engine.FSDPModule,
            engine.register_fsdp_forward_method,
            engine.share_comm_ctx,
        )

    def groups(self, model: nn.Module) -> Sequence[engine.GroupInfo]:
        return engine.groups(model)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        log = tuple(log)
        gathers = tuple(entry for entry in log if entry.label == GATHER)
        reductions = tuple(entry for entry in log if entry.label == REDUCE)
        # A sum in low precision is made piece by piece, and then spread: that is a part of its reduction.
        others = tuple(entry for entry in log if entry.label not in (GATHER, REDUCE, SPREAD, WRAP))
        return Traffic(gathers, reductions, others)

    def grad_scaler(self, model: nn.Module, **settings: Any) -> torch.amp.GradScaler:
        return engine.ShardedGradScaler(**settings)


class Lockstep(_BuiltIn, Wrapped):
    """The wrapper front, with the composable one as `composable`."""

    name = "lockstep"
    front = Wrapper(
        engine.FullyShardedDataParallel,
        engine.ShardingStrategy,
        engine.BackwardPrefetch,
        engine.CPUOffload,
        engine.MixedPrecision,
        engine.CustomPolicy,
        engine.ModuleWrapPolicy,
        engine.always_wrap_policy,
        engine.lambda_auto_wrap_policy,
        engine.size_based_auto_wrap_policy,
        engine.transformer_auto_wrap_policy,
        engine.enable_wrap,
        engine.wrap,
    )
    capabilities = frozenset(Capability)

    @property
    def state_dicts(self) -> StateDicts:
        return StateDicts(
            engine.FullyShardedDataParallel,
            engine.StateDictType,
            engine.FullStateDictConfig,
            engine.LocalStateDictConfig,
            engine.ShardedStateDictConfig,
            engine.FullOptimStateDictConfig,
            engine.LocalOptimStateDictConfig,
            engine.ShardedOptimStateDictConfig,
        )

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        full_precision = spec.full_precision_in_eval
        return self.wrap(model, spec, device_id=spec.device, full_precision_in_eval=full_precision)

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        found = _whole(model, state_dict.full_parameters, lambda parameter: parameter)
        return {name: parameter.detach().clone() for name, parameter in found.items()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        found = _whole(model, state_dict.full_gradients, lambda parameter: parameter.grad)
        return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


def _whole(
    model: nn.Module, read: Callable[[Mapping[str, Unit]], dict[str, T]], own: Callable[[nn.Parameter], T]
) -> dict[str, T]:
    """Return what `read` returns of all units, and `own` of each parameter in none, in the model's order."""
    named = list(model.named_modules())
    units = {name: m._unit for name, m in named if isinstance(m, engine.FullyShardedDataParallel)}
    found = read(units)
    shards = [unit.group.shard for unit in units.values() if unit.group]
    seen = {param.parameter for shard in shards for param in shard.params} | {shard.flat for shard in shards}
    for name, module in named:
        for last, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found[joined(name, last)] = own(parameter)
    places = {name: place for place, (name, _) in enumerate(named)}
    return dict(sorted(found.items(), key=lambda pair: places[pair[0].rpartition(".")[0]]))


class LockstepComposable(_BuiltIn, Composed):
    """`fully_shard` and `replicate` of the built-in engine."""

    name = "lockstep-composable"
