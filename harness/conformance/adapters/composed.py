"""A base for adapters of engines with a composable front: applies a `ShardSpec` bottom-up. Inside a rank.

Parameters are DTensors, whatever `use_orig_params` is: this front has originals only.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.assertions.full_tensors import full_tensors
from lockstep.conformance.adapters.adapter import Adapter
from lockstep.conformance.adapters.torch_internals import num_pre_backward_hooks
from lockstep.conformance.capabilities import Capability, NotOffered, require
from lockstep.conformance.interface import Composable
from lockstep.conformance.spec import ProcessGroups, ShardSpec, chosen_modules, required_capabilities

_STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": None,
    "HYBRID_SHARD": True,
    "_HYBRID_SHARD_ZERO2": False,
}
_NOT_OFFERED = {
    Capability.HYBRID_BY_HOSTS,
    Capability.UNITS_BY_SIZE,
    Capability.BUFFER_DTYPE,
    Capability.KEPT_LOW_PRECISION,
    Capability.PRECISION_IN_EVAL,
    Capability.NORM_UNITS,
    Capability.PREFETCH,
    Capability.SYNC_STATES,
    Capability.UNSYNCED_GRADIENTS,
    Capability.PLAIN_PARAMETERS,
    Capability.ONE_NORM,
    Capability.STATE_DICTS,
    Capability.WRAPPER,
    Capability.SUMMON,
    Capability.ONE_PADDING,
}


class Composed(Adapter):
    """An adapter of which everything is here that needs nothing but a composable front."""

    capabilities = frozenset(Capability) - _NOT_OFFERED

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        if spec.strategy not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise ValueError(f"ShardSpec: strategy {spec.strategy!r} is not built; known: {known}")
        require(self, *required_capabilities(spec))
        self._check_dimensions(model, spec)
        if spec.device is not None:
            model.to(spec.device)
        _Application(self.composable, model, spec).apply()
        if spec.backward_prefetch is None:
            # Each unit prefetches itself, which is unsharded already; without a list they choose one.
            units: list[Any] = [m for m in model.modules() if isinstance(m, self.composable.FSDPModule)]
            for unit in units:
                unit.set_modules_to_backward_prefetch([unit])
        return model

    def _check_dimensions(self, model: nn.Module, spec: ShardSpec) -> None:
        ignored = chosen_modules(model, spec.ignored, "ignored")
        kept = {p for module in ignored for p in module.parameters()}
        if spec.strategy != "NO_SHARD" and any(p.ndim == 0 for p in model.parameters() if p not in kept):
            raise NotOffered(self.name, Capability.SCALARS)  # there is no dim to shard

    def pre_backward_hooks(self, output: Tensor) -> int:
        return num_pre_backward_hooks(output)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        meshes = {getattr(p, "device_mesh", None) for p in model.parameters()}
        if len(meshes) > 1:  # torch stacks the norms of all parameters, and so they must be sharded alike
            require(self, Capability.ONE_NORM)
        return full(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))

    @torch.no_grad()
    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        return {name: p.clone() for name, p in full_tensors(dict(model.named_parameters())).items()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        gradients = full_tensors({name: p.grad for name, p in model.named_parameters()})
        return {name: None if g is None else g.clone() for name, g in gradients.items()}

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return full_tensors(model.state_dict())

    def summon(
        self, model: nn.Module, writeback: bool = False, with_grads: bool = False
    ) -> AbstractContextManager[None]:
        # `unshard` shows what modules compute with, in its dtype, and nothing of it is kept.
        raise NotOffered(self.name, Capability.SUMMON)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, a collective; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _inner_first(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, by its first name, after all that are inside it at any of its places."""
    if module in seen:
        return
    seen.add(module)
    for child, inner in module.named_children():
        yield from _inner_first(f"{name}.{child}" if name else child, inner, seen)
    yield name, module


@dataclass(frozen=True)
class _Application:
    """A spec that is applied to a model."""

    front: Composable
    model: nn.Module
    spec: ShardSpec

    def apply(self) -> None:
        """Wrap the units, inner before outer, then the model."""
        spec = self.spec
        units = chosen_modules(self.model, (*spec.units, *spec.unit_groups, *spec.unit_precisions), "units")
        ignored = chosen_modules(self.model, spec.ignored, "ignored")
        kept = {p for module in ignored for p in module.parameters()}
        kept_modules = {part for module in ignored for part in module.modules()}
        precise = (spec.precision and spec.precision.full_precision_classes) or ()
        for name, module in _inner_first("", self.model, set()):
            if module is self.model:
                continue
            # As with a wrap policy: these have no forward, in which they could be unsharded.
            if isinstance(module, nn.ModuleList | nn.ModuleDict) or module in kept_modules:
                continue
            if isinstance(module, precise):
                low = spec.precision and spec.precision.param_dtype
                full = torch.float32
                policy = self.front.MixedPrecisionPolicy(full, reduce_dtype=full, output_dtype=low)
                self._wrap(module, kept, policy)
            elif module in units:
                self._wrap(module, kept, self._policy(name, is_root=False), self._mesh(name))
        self._wrap(self.model, kept, self._policy("", is_root=True), self._mesh(""))

    def _wrap(
        self, module: nn.Module, ignored: set[nn.Parameter], policy: Any, mesh: DeviceMesh | None = None
    ) -> None:
        settings: dict[str, Any] = {"mesh": mesh or self._mesh(""), "mp_policy": policy}
        if self.spec.offload:
            settings["offload_policy"] = self.front.CPUOffloadPolicy(pin_memory=False)
        if ignored:
            settings["ignored_params"] = ignored & set(module.parameters())
        freed = _STRATEGIES[self.spec.strategy]
        if freed is None:
            self.front.replicate(module, **settings)
        else:
            self.front.fully_shard(module, reshard_after_forward=freed, **settings)

    def _policy(self, name: str, is_root: bool) -> Any:
        precision = self.spec.unit_precisions.get(name, self.spec.precision)
        if precision is None:
            return self.front.MixedPrecisionPolicy()
        casts = precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs
        return self.front.MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduction_dtype,
            cast_forward_inputs=casts,
        )

    def _mesh(self, name: str) -> DeviceMesh | None:
        groups = self.spec.unit_groups.get(name) or self.spec.process_group
        device = next(self.model.parameters()).device.type
        return None if groups is None else mesh_of(groups, device)


def mesh_of(groups: ProcessGroups, device: str) -> DeviceMesh:
    """Return the mesh over one group, or over the pair (shard, replicate)."""
    if not isinstance(groups, tuple):
        return DeviceMesh.from_group(groups, device)
    shard, replicate = groups
    # Ranks of other replicas are not known here; a mesh is regular, so each row is this one, moved.
    own, me = dist.get_process_group_ranks(shard), dist.get_rank()
    rows = [[other + rank - me for rank in own] for other in dist.get_process_group_ranks(replicate)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], device, mesh=torch.tensor(rows), mesh_dim_names=names)
