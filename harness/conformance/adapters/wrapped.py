"""A base for adapters of engines with a wrapper front. Inside a rank; imports torch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.conformance.adapters.adapter import Adapter
from lockstep.conformance.adapters.torch_internals import num_pre_backward_hooks
from lockstep.conformance.interface import Wrapper
from lockstep.conformance.spec import Precision, ShardSpec, chosen_modules


class Wrapped(Adapter):
    """An adapter of which everything is here that needs nothing but a wrapper front."""

    front: Wrapper

    @property
    def wrapper(self) -> Wrapper:
        return self.front

    def wrap(self, model: nn.Module, spec: ShardSpec, **more: Any) -> nn.Module:
        """Return `model` in the wrapper; `more` are arguments that not every such front has."""
        front, prefetch = self.front, spec.backward_prefetch
        wrapped: nn.Module = front.FullyShardedDataParallel(
            model,
            process_group=spec.process_group,
            sharding_strategy=_member(front.ShardingStrategy, "strategy", spec.strategy),
            cpu_offload=front.CPUOffload(spec.offload),
            auto_wrap_policy=self._policy(model, spec),
            ignored_modules=chosen_modules(model, spec.ignored, "ignored") or None,
            backward_prefetch=None
            if prefetch is None
            else _member(front.BackwardPrefetch, "backward_prefetch", prefetch),
            forward_prefetch=spec.forward_prefetch,
            mixed_precision=self._mixed_precision(spec.precision),
            sync_module_states=spec.sync_module_states,
            use_orig_params=spec.use_orig_params,
            **more,
        )
        return wrapped

    def unwrapped(self, model: nn.Module) -> nn.Module:
        bare: nn.Module = model.module if isinstance(model, self.front.FullyShardedDataParallel) else model
        return bare

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = model.no_sync()
        return context

    def clip_grad_norm_(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
        return norm

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return model.state_dict()

    def pre_backward_hooks(self, output: Tensor) -> int:
        return num_pre_backward_hooks(output)

    def summon(
        self, model: nn.Module, writeback: bool = False, with_grads: bool = False
    ) -> AbstractContextManager[None]:
        summon = self.front.FullyShardedDataParallel.summon_full_params
        context: AbstractContextManager[None] = summon(model, writeback=writeback, with_grads=with_grads)
        return context

    def _mixed_precision(self, precision: Precision | None) -> Any:
        if precision is None:
            return None
        settings = {f.name: getattr(precision, f.name) for f in fields(Precision)}
        classes = settings.pop("full_precision_classes")
        ignored = {} if classes is None else {"_module_classes_to_ignore": classes}
        return self.front.MixedPrecision(**settings, **ignored)

    def _policy(self, model: nn.Module, spec: ShardSpec) -> Any:
        wanted = (*spec.units, *spec.unit_groups, *spec.unit_precisions)
        if spec.min_num_params is not None:
            if wanted:
                raise ValueError("ShardSpec: min_num_params chooses the units; name no unit as well.")
            return partial(self.front.size_based_auto_wrap_policy, min_num_params=spec.min_num_params)
        # Classes that compute in full precision are found by any policy, also by one that chooses nothing.
        if not wanted and (spec.precision is None or spec.precision.full_precision_classes is None):
            return None
        chosen = chosen_modules(model, wanted, "units")
        modules = dict(model.named_modules())
        own: dict[nn.Module, dict[str, Any]] = {}
        for name, group in spec.unit_groups.items():
            own.setdefault(modules[name], {})["process_group"] = group
        for name, precision in spec.unit_precisions.items():
            own.setdefault(modules[name], {})["mixed_precision"] = self._mixed_precision(precision)
        return self.front.CustomPolicy(lambda module: own.get(module, module in chosen))


def _member(choices: type[Enum], what: str, name: str) -> Enum:
    known = choices.__members__
    if name not in known:
        raise ValueError(f"ShardSpec: {what} {name!r} is not built; known: {', '.join(known)}")
    return known[name]
