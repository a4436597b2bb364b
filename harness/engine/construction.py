"""From what a user asks of one unit to the unit: checks, placement, equal start. Runs on ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import collectives
from harness.engine.axes import Axes, ProcessGroups
from harness.engine.group import ShardGroup
from harness.engine.hooks import Unit, UnitSettings
from harness.engine.parameters import Entry, Slot, collect, own_modules
from harness.engine.policy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from harness.engine.shard import GroupSettings


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
    ignored_modules: frozenset[nn.Module]
    ignored_parameters: frozenset[nn.Parameter]

    @property
    def axes(self) -> Axes:
        return Axes.of(self.strategy, self.process_group)


def build_unit(module: nn.Module, plan: Plan, is_unit: Callable[[nn.Module], bool]) -> Unit:
    """Shard what ``module`` holds and no unit below it (``is_unit``) does, and return the unit."""
    modules = list(own_modules(module, lambda m: is_unit(m) or m in plan.ignored_modules))
    entries = collect(modules, plan.ignored_parameters)
    buffers = _buffers(modules)
    _place(entries, buffers, plan)
    if plan.sync_module_states:
        tensors = [entry.parameter.data for entry in entries] + [
            s.module._buffers[s.name] for s in buffers.values()
        ]
        collectives.broadcast((t for t in tensors if t is not None), plan.axes)
    device = _compute_device(entries, plan) if plan.offload else plan.device
    settings = GroupSettings(
        unit=f"FullyShardedDataParallel({type(module).__name__})",
        strategy=plan.strategy,
        mixed_precision=plan.mixed_precision,
        use_orig_params=plan.use_orig_params,
        axes=plan.axes,
        offload_device=device if plan.offload else None,
        poison=os.environ.get("LOCKSTEP_ENGINE_DEBUG", "0") not in ("", "0"),
    )
    group = ShardGroup(entries, settings) if entries else None
    settings_of_unit = UnitSettings(
        plan.strategy,
        plan.mixed_precision,
        device,
        keeps_precision=False,
        forward_prefetch=plan.forward_prefetch,
        backward_prefetch=plan.backward_prefetch,
    )
    return Unit(group, buffers, settings_of_unit)


def as_device(device_id: int | torch.device | None) -> torch.device | None:
    """Return the device that ``device_id`` names; an int counts the host's accelerators."""
    if not isinstance(device_id, int):
        return device_id
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise ValueError(
            f"device_id={device_id}: this host has no accelerator; pass torch.device('cpu') or None."
        )
    return torch.device(accelerator.type, device_id)


def ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Module | nn.Parameter] | None
) -> tuple[frozenset[nn.Module], frozenset[nn.Parameter]]:
    """Return all modules and parameters that are left alone; what lies below an ignored module is, too."""
    given = [*(modules or ()), *(states or ())]
    for one in given:
        if not isinstance(one, nn.Module | nn.Parameter):
            raise TypeError(f"ignored_modules, ignored_states: expected modules or parameters, got {one!r}")
    below = frozenset(m for one in given if isinstance(one, nn.Module) for m in one.modules())
    parameters = {p for p in given if isinstance(p, nn.Parameter)}
    return below, frozenset(parameters.union(p for m in below for p in m.parameters(recurse=False)))


def refuse_unbuilt(**asked: object) -> None:
    """Raise NotImplementedError for arguments that are part of the signature but have no effect yet."""
    given = [name for name, value in asked.items() if value]
    if given:
        raise NotImplementedError(
            f"FullyShardedDataParallel: {', '.join(given)} is not built yet; leave the default."
        )
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "0") == "1":
        raise NotImplementedError(
            "FSDP_USE_FULL_PREC_IN_EVAL=1: full precision in eval is not built yet; unset it."
        )


def _buffers(modules: Iterable[tuple[str, nn.Module]]) -> Mapping[str, Slot]:
    return {
        f"{module_name}.{name}" if module_name else name: Slot(module, name)
        for module_name, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _place(entries: Iterable[Entry], buffers: Mapping[str, Slot], plan: Plan) -> None:
    if plan.device is None:
        return
    for entry in entries:
        if not plan.offload and not entry.parameter.is_meta:
            entry.parameter.data = entry.parameter.data.to(plan.device)
    for slot in buffers.values():
        buffer = slot.module._buffers[slot.name]
        slot.module._buffers[slot.name] = buffer if buffer is None else buffer.to(plan.device)


def _compute_device(entries: Iterable[Entry], plan: Plan) -> torch.device:
    """Return where offloaded groups compute: as told, else where parameters were, else by the backend."""
    if plan.device:
        return plan.device
    for entry in entries:
        if entry.parameter.device.type != "cpu":
            return entry.parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in dist.get_backend_config(plan.axes.groups[0]):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
