"""The adapter of the built-in engine: its wrapper front, and beside it the composable one. Inside a rank."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import harness.engine as lockstep
from harness.adapters.capabilities import Capability
from harness.adapters.face import Composable, Group, Traffic
from harness.adapters.spec import Precision, ShardSpec, chosen_modules
from harness.engine.collectives import GATHER, REDUCE, SPREAD, WRAP
from harness.recorders import Collective

__all__ = ["Lockstep", "composable", "traffic"]


class Lockstep:
    """The built-in engine: its wrapper front, and beside it the composable one."""

    name = "lockstep"
    capabilities = frozenset(Capability)

    @property
    def composable(self) -> Composable:
        return composable()

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        return lockstep.FullyShardedDataParallel(
            model,
            process_group=spec.process_group,
            sharding_strategy=_strategy(spec.strategy),
            cpu_offload=lockstep.CPUOffload(spec.offload),
            auto_wrap_policy=_policy(model, spec),
            ignored_modules=chosen_modules(model, spec.ignored, "ignored") or None,
            backward_prefetch=_backward_prefetch(spec.backward_prefetch),
            forward_prefetch=spec.forward_prefetch,
            mixed_precision=_mixed_precision(spec.precision),
            device_id=spec.device,
            sync_module_states=spec.sync_module_states,
            use_orig_params=spec.use_orig_params,
            full_precision_in_eval=spec.full_precision_in_eval,
        )

    def groups(self, model: nn.Module) -> Sequence[Group]:
        return lockstep.groups(model)

    def pre_backward_hooks(self, output: Tensor) -> int:
        # torch has no public question for it; a test that asks has put no hook of its own there.
        return len(output._backward_hooks or ())

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return lockstep.FullyShardedDataParallel.summon_full_params(model, writeback=writeback)

    def bare(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, lockstep.FullyShardedDataParallel) else model

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync

    def clip_grad_norm_(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
        return norm

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return model.state_dict()

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        with self.summon(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        summon = lockstep.FullyShardedDataParallel.summon_full_params
        with summon(model, writeback=False, with_grads=True):
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


def _strategy(name: str) -> lockstep.ShardingStrategy:
    known = lockstep.ShardingStrategy.__members__
    if name not in known:
        raise ValueError(f"ShardSpec: strategy {name!r} is not built; known: {', '.join(known)}")
    return known[name]


def _backward_prefetch(name: str | None) -> lockstep.BackwardPrefetch | None:
    known = lockstep.BackwardPrefetch.__members__
    if name is not None and name not in known:
        raise ValueError(f"ShardSpec: backward_prefetch {name!r} is unknown; known: {', '.join(known)}, None")
    return None if name is None else known[name]


def _mixed_precision(precision: Precision | None) -> lockstep.MixedPrecision | None:
    if precision is None:
        return None
    asked = {f.name: getattr(precision, f.name) for f in fields(Precision)}
    classes = asked.pop("full_precision_classes")
    ignored = {} if classes is None else {"_module_classes_to_ignore": classes}
    return lockstep.MixedPrecision(**asked, **ignored)


def _policy(model: nn.Module, spec: ShardSpec) -> lockstep.WrapPolicy | Callable[..., bool] | None:
    wanted = (*spec.units, *spec.unit_groups, *spec.unit_precisions)
    if spec.min_num_params is not None:
        if wanted:
            raise ValueError("ShardSpec: min_num_params chooses the units; name no unit beside it.")
        return partial(lockstep.size_based_auto_wrap_policy, min_num_params=spec.min_num_params)
    # Classes that compute in full precision are found by whatever policy, also by one that chooses nothing.
    if wanted or (spec.precision and spec.precision.full_precision_classes is not None):
        return _policy_of_chosen(model, spec, chosen_modules(model, wanted, "units"))
    return None


def _policy_of_chosen(
    model: nn.Module, spec: ShardSpec, chosen: Collection[nn.Module]
) -> lockstep.WrapPolicy:
    modules = dict(model.named_modules())
    own: dict[nn.Module, dict[str, Any]] = {}
    for name, group in spec.unit_groups.items():
        own.setdefault(modules[name], {})["process_group"] = group
    for name, precision in spec.unit_precisions.items():
        own.setdefault(modules[name], {})["mixed_precision"] = _mixed_precision(precision)
    return lockstep.CustomPolicy(lambda module: own.get(module, module in chosen))
