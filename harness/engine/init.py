"""From what a user asks of one unit to the unit: checks, placement, equal start. Runs on ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import collectives
from harness.engine.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from harness.engine.casting import Buffers
from harness.engine.config import Precision
from harness.engine.gradients import VisibleGradients
from harness.engine.local_shard import GroupSettings, LocalShard
from harness.engine.materialise import Materialiser, ParamInit
from harness.engine.mesh import MeshInfo, ProcessGroups
from harness.engine.param import Param, ParamRef, collect, mark_sharded, own_modules, refuse_sharded
from harness.engine.param_group import ParamGroup
from harness.engine.unit import Unit, UnitSettings
from harness.engine.wrapping import has_forward


@dataclass(frozen=True)
class Plan:
    """What the user asked for, with defaults filled in. ``device`` None: where the parameters are."""

    process_group: ProcessGroups
    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    offload: bool
    use_orig_params: bool
    forward_prefetch: bool
    backward_prefetch: BackwardPrefetch | None
    device: torch.device | None
    sync_module_states: bool
    ignored: Ignored
    param_init_fn: ParamInit | None
    full_precision_in_eval: bool

    @property
    def axes(self) -> MeshInfo:
        return MeshInfo.of(self.strategy, self.process_group)


def build_unit(module: nn.Module, plan: Plan, is_unit: Callable[[nn.Module], bool]) -> Unit:
    """Shard what ``module`` holds and no unit below it (``is_unit``) does, and return the unit."""
    name = unit_name(module)
    modules = list(own_modules(module, lambda m: is_unit(m) or m in plan.ignored.modules))
    params = _made(modules, plan, name)
    buffers = _buffers(modules)
    _place(params, buffers, plan, name)
    _refuse_disagreement(params, plan, name)
    if plan.sync_module_states:
        tensors = [param.parameter.data for param in params] + [s.module._buffers[s.name] for s in buffers]
        collectives.broadcast((t for t in tensors if t is not None), plan.axes.groups)
    device = _compute_device(params, plan) if plan.offload else plan.device
    precision = Precision(plan.mixed_precision, module, plan.full_precision_in_eval)
    settings = GroupSettings(
        unit=name,
        strategy=plan.strategy,
        precision=precision,
        use_orig_params=plan.use_orig_params,
        axes=plan.axes,
        offload_device=device if plan.offload else None,
        poison=poisons(),
    )
    group = ParamGroup(shard := LocalShard(params, settings), VisibleGradients(shard)) if params else None
    settings_of_unit = UnitSettings(
        plan.strategy,
        precision,
        device,
        keeps_precision=False,
        forward_prefetch=plan.forward_prefetch,
        backward_prefetch=plan.backward_prefetch,
    )
    return Unit(group, Buffers(buffers, goes_back=plan.full_precision_in_eval), settings_of_unit)


def _refuse_disagreement(params: Sequence[Param], plan: Plan, unit: str) -> None:
    """Raise ValueError if another rank wraps something else now: gloo would end the process later."""
    mine = [unit, plan.strategy.name, *map(describe, params)]
    refuse_disagreement(mine, plan.axes, _compute_device(params, plan))


def describe(param: Param) -> str:
    """Return what ranks compare of one parameter."""
    return f"{param.name!r} {list(param.shape)} {param.parameter.dtype}"


def refuse_disagreement(mine: list[str], axes: MeshInfo, device: torch.device) -> None:
    """Raise ValueError if ``mine``, the name of a unit and what it wraps, is not the same on all ranks."""
    unit = mine[0]
    found = [collectives.gather_wrapped(mine, group, device) for group in axes.groups]
    for rank, theirs in (pair for ranks in found for pair in enumerate(ranks)):
        if theirs != mine:
            here, there = next((a, b) for a, b in zip_longest(mine, theirs, fillvalue="no more") if a != b)
            raise ValueError(
                f"{unit}: ranks wrap different things: {here} here, {there} on rank {rank} of the process "
                f"group, which wraps {theirs[0]}. Build the same model on all ranks, and wrap the same "
                "modules of it in the same order."
            )


def poisons() -> bool:
    """Tell whether freed and sent memory is to be filled with NaN."""
    return os.environ.get("LOCKSTEP_ENGINE_DEBUG", "0") not in ("", "0")


def unit_name(module: nn.Module) -> str:
    """Return how error messages call the unit of ``module``."""
    return f"FullyShardedDataParallel({type(module).__name__})"


def as_device(device_id: object, groups: ProcessGroups) -> torch.device | None:
    """Return the device that ``device_id`` names; an int counts the host's accelerators.

    Raises ValueError if this host has no such device or the backend of ``groups`` does not serve it.
    """
    if device_id is None:
        return None
    if not isinstance(device_id, int | torch.device):
        raise TypeError(f"device_id: expected an int or a torch.device, got {device_id!r}")
    device = _present(device_id)
    backends = _backends(groups)
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"device_id={device_id}: the process group communicates on {backends} only; "
            "pass a device that its backend serves, or a process group of another backend."
        )
    return device


def _backends(groups: ProcessGroups) -> str:
    """Return which backend serves which type of device, such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(groups[0] if isinstance(groups, tuple) else groups))


def _present(device_id: int | torch.device) -> torch.device:
    """Return the device that ``device_id`` names on this host, with its index."""
    if isinstance(device_id, torch.device) and device_id.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != torch.device(device_id).type:
        raise ValueError(
            f"device_id={device_id}: this host has {accelerator or 'no accelerator'}; "
            "pass torch.device('cpu'), or None for where the parameters are."
        )
    index = device_id if isinstance(device_id, int) else device_id.index
    index = torch.accelerator.current_device_index() if index is None else index
    if index >= (count := torch.accelerator.device_count()):
        raise ValueError(f"device_id={device_id}: this host has {count} of {accelerator}, counted from 0.")
    return torch.device(accelerator.type, index)


def full_precision_in_eval(argument: object) -> bool:
    """Return ``argument``, or where it is None what the environment says; TypeError for what is no bool."""
    if argument is None:
        return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
    if not isinstance(argument, bool):
        raise TypeError(f"full_precision_in_eval: expected True, False or None, got {argument!r}")
    return argument


def _buffers(modules: Iterable[tuple[str, nn.Module]]) -> list[ParamRef]:
    return [
        ParamRef(module, name)
        for _, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _made(modules: Sequence[tuple[str, nn.Module]], plan: Plan, unit: str) -> tuple[Param, ...]:
    """Return the unit's parameters, none of them on meta any more."""
    params = collect(modules, plan.ignored.parameters)
    refuse_sharded(modules, params, unit)
    device = torch.device("cpu") if plan.offload else _compute_device(params, plan)
    materialiser = Materialiser(unit, device, plan.param_init_fn, plan.ignored.parameters)
    materialiser.make({module: name for name, module in modules})
    # Another unit that sees one of these would make values of its own, and nobody would see the tie.
    mark_sharded((param for param in params if param.parameter.is_meta), unit)
    return collect(modules, plan.ignored.parameters)


def _place(params: Iterable[Param], buffers: Iterable[ParamRef], plan: Plan, unit: str) -> None:
    if plan.device is None:
        return
    for param in params:
        found = param.parameter.device
        if found.type != "cpu" and found != plan.device:
            raise ValueError(
                f"{unit}: parameter {param.name!r} is on {found}, but device_id is {plan.device}; move the "
                "module there or to CPU first, or leave device_id out."
            )
        if not plan.offload:
            param.parameter.data = param.parameter.data.to(plan.device)
    for ref in buffers:
        buffer = ref.module._buffers[ref.name]
        ref.module._buffers[ref.name] = buffer if buffer is None else buffer.to(plan.device)


def _compute_device(params: Iterable[Param], plan: Plan) -> torch.device:
    return plan.device or device_of(params, plan.process_group)


def device_of(params: Iterable[Param], groups: ProcessGroups) -> torch.device:
    """Return where a unit that nobody told computes: where its parameters are, else by the backend."""
    for param in params:
        if param.parameter.device.type not in ("cpu", "meta"):
            return param.parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in _backends(groups):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "sharding_strategy": ShardingStrategy,
        "cpu_offload": CPUOffload,
        "mixed_precision": MixedPrecision,
        "backward_prefetch": BackwardPrefetch,
    }
)


def check_types(param_init_fn: object, **given: object) -> None:
    """Raise TypeError for an argument of another type; torch's own types are others, too."""
    for name, value in given.items():
        expected = _TYPES[name]
        if value is not None and not isinstance(value, expected):
            found = type(value)
            raise TypeError(
                f"{name}: expected None or a {expected.__name__} of harness.engine, got {value!r}, "
                f"a {found.__qualname__} of {found.__module__}."
            )
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn: expected a function that takes a module, got {param_init_fn!r}")


def check_module(module: object, wrapper: type[nn.Module]) -> None:
    """Raise TypeError or ValueError for what can be no unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if isinstance(module, wrapper):
        raise ValueError(
            f"FullyShardedDataParallel({type(module.module).__name__}) is a unit already; "
            "use it as it is, or wrap a module that contains it."
        )
    if not has_forward(module):
        raise ValueError(
            f"FullyShardedDataParallel cannot wrap {type(module).__name__}: it has no forward of its own; "
            "wrap what it contains, or the module that contains it."
        )


def warn_if_all_ignored(module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Warn when the module to wrap is itself ignored, so that the unit has no parameters."""
    if module in ignored:
        warnings.warn(
            f"FullyShardedDataParallel({type(module).__name__}): the module is itself in ignored_modules, so "
            "nothing of it is sharded; ignore modules below it, or do not wrap it.",
            UserWarning,
            stacklevel=3,
        )


@dataclass(frozen=True)
class Ignored:
    """Modules, with all that lies below them, and parameters, with all of those modules' own."""

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()

    @property
    def states(self) -> frozenset[nn.Module | nn.Parameter]:
        return self.modules | self.parameters

    def union(self, others: Iterable[Ignored]) -> Ignored:
        others = list(others)
        return Ignored(
            self.modules.union(*(other.modules for other in others)),
            self.parameters.union(*(other.parameters for other in others)),
        )


def resolve_ignored(modules: object, states: object, is_unit: Callable[[nn.Module], bool]) -> Ignored:
    """Return what the arguments ``ignored_modules`` and ``ignored_states`` mean; None is nothing.

    Raises ValueError when both are given or a unit (``is_unit``) is among them, TypeError for anything that
    is not an iterable of modules (or, in ``states``, of parameters).
    """
    if modules is not None and states is not None:
        raise ValueError(
            "ignored_modules and ignored_states are both given; put all modules and parameters into "
            "ignored_states. (Units made by auto_wrap_policy have the outer unit's ignored_states already.)"
        )
    given = _listed("ignored_modules: expected a list of modules", modules, nn.Module)
    either = "ignored_states: expected a list of modules or parameters"
    given += _listed(either, states, nn.Module | nn.Parameter)
    below = frozenset(m for one in given if isinstance(one, nn.Module) for m in one.modules())
    for module in filter(is_unit, below):
        raise ValueError(
            f"ignored_modules, ignored_states: they contain {type(module).__name__}"
            f"({type(next(module.children(), None)).__name__}), which shards its parameters already; "
            "ignore what is not wrapped, or do not wrap it."
        )
    parameters = {p for p in given if isinstance(p, nn.Parameter)}
    return Ignored(below, frozenset(parameters.union(p for m in below for p in m.parameters(recurse=False))))


def ignored_parameters(front: str, given: object) -> frozenset[nn.Parameter]:
    """Return what ``ignored_params`` of ``front`` names; TypeError for what is no parameter."""
    return frozenset(_listed(f"{front}: ignored_params: expected a set of parameters", given, nn.Parameter))


def _listed(expected: str, given: object, kind: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable) or isinstance(given, nn.Parameter | str):
        raise TypeError(f"{expected}, got one {type(given).__name__}; put it into a list.")
    listed = list(given)
    for index, one in enumerate(listed):
        if not isinstance(one, kind):
            raise TypeError(f"{expected}, but number {index} is a {type(one).__name__}.")
    return listed
