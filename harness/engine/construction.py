"""From what a user asks of one unit to the unit: checks, placement, equal start. Runs on ranks."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import collectives
from harness.engine.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from harness.engine.axes import Axes, ProcessGroups
from harness.engine.casting import Buffers
from harness.engine.group import ShardGroup
from harness.engine.hooks import Unit, UnitSettings
from harness.engine.ignored import Ignored
from harness.engine.materialise import Materialiser, ParamInit
from harness.engine.parameters import Entry, Slot, claim, collect, own_modules, refuse_claimed
from harness.engine.precision import Precision
from harness.engine.shard import GroupSettings, LocalShard
from harness.engine.shown_gradients import ShownGradients


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
    def axes(self) -> Axes:
        return Axes.of(self.strategy, self.process_group)


def build_unit(module: nn.Module, plan: Plan, is_unit: Callable[[nn.Module], bool]) -> Unit:
    """Shard what ``module`` holds and no unit below it (``is_unit``) does, and return the unit."""
    name = unit_name(module)
    modules = list(own_modules(module, lambda m: is_unit(m) or m in plan.ignored.modules))
    entries = _made(modules, plan, name)
    buffers = _buffers(modules)
    _place(entries, buffers, plan, name)
    _refuse_disagreement(entries, plan, name)
    if plan.sync_module_states:
        tensors = [entry.parameter.data for entry in entries] + [
            s.module._buffers[s.name] for s in buffers.values()
        ]
        collectives.broadcast((t for t in tensors if t is not None), plan.axes.groups)
    device = _compute_device(entries, plan) if plan.offload else plan.device
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
    group = ShardGroup(shard := LocalShard(entries, settings), ShownGradients(shard)) if entries else None
    settings_of_unit = UnitSettings(
        plan.strategy,
        precision,
        device,
        keeps_precision=False,
        forward_prefetch=plan.forward_prefetch,
        backward_prefetch=plan.backward_prefetch,
    )
    return Unit(group, Buffers(buffers, goes_back=plan.full_precision_in_eval), settings_of_unit)


def _refuse_disagreement(entries: Sequence[Entry], plan: Plan, unit: str) -> None:
    """Raise ValueError if another rank wraps something else now: gloo would end the process later."""
    mine = [unit, plan.strategy.name, *map(describe, entries)]
    refuse_disagreement(mine, plan.axes, _compute_device(entries, plan))


def describe(entry: Entry) -> str:
    """Return what ranks compare of one parameter."""
    return f"{entry.name!r} {list(entry.shape)} {entry.parameter.dtype}"


def refuse_disagreement(mine: list[str], axes: Axes, device: torch.device) -> None:
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


def _buffers(modules: Iterable[tuple[str, nn.Module]]) -> Mapping[str, Slot]:
    return {
        f"{module_name}.{name}" if module_name else name: Slot(module, name)
        for module_name, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _made(modules: Sequence[tuple[str, nn.Module]], plan: Plan, unit: str) -> tuple[Entry, ...]:
    """Return the unit's parameters, none of them on meta any more."""
    entries = collect(modules, plan.ignored.parameters)
    refuse_claimed(modules, entries, unit)
    device = torch.device("cpu") if plan.offload else _compute_device(entries, plan)
    materialiser = Materialiser(unit, device, plan.param_init_fn, plan.ignored.parameters)
    materialiser.make({module: name for name, module in modules})
    # Another unit that sees one of these would make values of its own, and nobody would see the tie.
    claim((entry for entry in entries if entry.parameter.is_meta), unit)
    return collect(modules, plan.ignored.parameters)


def _place(entries: Iterable[Entry], buffers: Mapping[str, Slot], plan: Plan, unit: str) -> None:
    if plan.device is None:
        return
    for entry in entries:
        found = entry.parameter.device
        if found.type != "cpu" and found != plan.device:
            raise ValueError(
                f"{unit}: parameter {entry.name!r} is on {found}, but device_id is {plan.device}; move the "
                "module there or to CPU first, or leave device_id out."
            )
        if not plan.offload:
            entry.parameter.data = entry.parameter.data.to(plan.device)
    for slot in buffers.values():
        buffer = slot.module._buffers[slot.name]
        slot.module._buffers[slot.name] = buffer if buffer is None else buffer.to(plan.device)


def _compute_device(entries: Iterable[Entry], plan: Plan) -> torch.device:
    return plan.device or device_of(entries, plan.process_group)


def device_of(entries: Iterable[Entry], groups: ProcessGroups) -> torch.device:
    """Return where a unit that nobody told computes: where its parameters are, else by the backend."""
    for entry in entries:
        if entry.parameter.device.type not in ("cpu", "meta"):
            return entry.parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in _backends(groups):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
