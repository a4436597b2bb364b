"""The construction of units, the same for all fronts: checks, materialisation, placement. Runs on ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from lockstep.engine import collectives
from lockstep.engine.casting import BatchNormCast, Buffers
from lockstep.engine.config import Ignored, UnitConfig
from lockstep.engine.dtensor_param import place
from lockstep.engine.gradients import AccumulatedGradients, Gradients, VisibleGradients
from lockstep.engine.marks import OWNER
from lockstep.engine.materialise import Materialiser, any_on_meta, parents_first
from lockstep.engine.mesh import device_of
from lockstep.engine.param import LocalShard, Param, ParamRef, joined, local_of, mark_sharded
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.unit import Unit
from lockstep.engine.unsharded import Precision
from lockstep.engine.wrapping import has_forward

Owned = Sequence[tuple[str, nn.Module]]
"""The modules of a unit, by name within it."""


def build_unit(
    modules: Sequence[nn.Module], config: UnitConfig, is_unit: Callable[[nn.Module], bool]
) -> Unit:
    """Shard the parameters of `modules` that no unit below them (`is_unit`) has, and return the unit.

    Raises:
        ValueError: For what cannot be sharded; the message says what, where, and the remedy.
    """
    owned = _own_modules(modules, lambda m: is_unit(m) or m in config.ignored.modules)
    params: Sequence[Param] = _materialised(owned, config)
    device = _compute_device(params, config)
    # Ranks compare before they move or check: an error of one rank alone would leave the others waiting.
    wanted = [config.placement_fn(param.parameter) if config.placement_fn else None for param in params]
    _refuse_disagreement(modules, params, wanted, config, device)
    _place(params, owned, config)
    _check(params, config)
    if config.dtensor:
        params = place(params, wanted, config)
    if config.sync_module_states:
        states = [param.parameter.data for param in params] + [buffer for _, buffer in _buffers(owned)]
        collectives.broadcast(states, config.mesh.groups)
    if config.mixed_precision.param_dtype and device.type == "cpu":
        for _, module in owned:
            if isinstance(module, nn.BatchNorm1d):
                BatchNormCast(module)
    # Units live as long as the model, and what a caller's function refers to may be a whole checkpoint.
    config = replace(config, ignored=Ignored(), param_init_fn=None, placement_fn=None)
    if config.offload:
        config = replace(config, device=device)
    precision = Precision(config.mixed_precision, modules[0], config.full_precision_in_eval)
    group = None
    if params:
        shard = LocalShard.of(params, config)
        gradients: Gradients = AccumulatedGradients(shard) if config.dtensor else VisibleGradients(shard)
        group = ParamGroup(shard, gradients, precision)
    refs = [] if config.dtensor else [ref for ref, _ in _buffers(owned)]
    return Unit(group, Buffers(refs, goes_back=config.full_precision_in_eval), config, precision)


def copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return a unit that drives the copies of `unit`'s modules, which `memo` has already.

    It shares the process groups and nothing else. Like copies of an `nn.Module`, it starts without gradients.
    """
    precision = deepcopy(unit.precision, memo)
    group = None
    if unit.group:
        shard = unit.group.shard
        shard.reclaim()
        params = [
            replace(
                param,
                parameter=deepcopy(param.parameter, memo),
                refs=tuple(ParamRef(deepcopy(ref.module, memo), ref.name) for ref in param.refs),
            )
            for param in shard.params
        ]
        copied_shard = LocalShard(params, shard.config, flat=deepcopy(shard.flat, memo))
        group = ParamGroup(copied_shard, unit.group.gradients.like(copied_shard), precision)
    copied = Unit(group, deepcopy(unit.buffers, memo), unit.config, precision)
    # The groups to prefetch belong to the original.
    copied.options = replace(unit.options, forward_prefetch=(), backward_prefetch=())
    return copied


def _refuse_disagreement(
    modules: Sequence[nn.Module],
    params: Sequence[Param],
    wanted: Sequence[object],
    config: UnitConfig,
    device: torch.device,
) -> None:
    """Raise ValueError if another rank wraps something else now: gloo would end the process later."""
    mine = [config.name, config.strategy.name]
    for param, wish in zip(params, wanted, strict=True):
        placed = [*getattr(param.parameter, "placements", ()), *([wish] if isinstance(wish, Shard) else [])]
        if config.dtensor and not param.parameter.requires_grad:
            placed.append("frozen")  # only gradients of trained ones travel
        mine.append(" ".join(map(str, (repr(param.name), list(param.shape), param.parameter.dtype, *placed))))

    def ignored() -> list[str]:
        named = (found for module in modules for found in module.named_parameters())
        return [name for name, parameter in named if parameter in config.ignored.parameters]

    found = [collectives.gather_wrapped(mine, ignored, group, device) for group in config.mesh.groups]
    for rank, (theirs, ignored_there) in (pair for ranks in found for pair in enumerate(ranks)):
        if theirs != mine:
            here, there = next((a, b) for a, b in zip_longest(mine, theirs, fillvalue="no more") if a != b)
            cause = ""
            if ignored_there != (ignored_here := ignored()):
                names = [", ".join(map(repr, each)) or "nothing" for each in (ignored_here, ignored_there)]
                cause = f" This rank ignores {names[0]}, that one {names[1]}: ignore the same on both."
            raise ValueError(
                f"{config.name}: ranks wrap different things: {here} here, {there} on rank {rank} of the "
                f"process group, which wraps {theirs[0]}.{cause} Build the same model on all ranks, and wrap "
                "the same modules of it in the same order."
            )


def _materialised(owned: Owned, config: UnitConfig) -> tuple[Param, ...]:
    """Return the unit's parameters; those of the wrapper are not on meta any more."""
    params = _collect(owned, config.ignored.parameters)
    _refuse_sharded(owned, params, config.name)
    # `to_empty` gives those of the composable front memory after sharding.
    if config.dtensor or not any_on_meta(module for _, module in owned):
        return params
    device = torch.device("cpu") if config.offload else _compute_device(params, config)
    materialiser = Materialiser(config.name, device, config.param_init_fn, config.ignored.parameters)
    materialiser.make({module: name for name, module in owned})
    # Another unit that shares one of these would make values of its own, and the tie would be lost.
    mark_sharded((param for param in params if param.parameter.is_meta), config.name)
    return _collect(owned, config.ignored.parameters)


def _refuse_sharded(owned: Owned, params: Iterable[Param], unit: str) -> None:
    """Raise ValueError for a module or parameter that another unit shards, with its name and the remedy."""
    for name, module in owned:
        if owner := module.__dict__.get(OWNER):
            place = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"{unit}: {place} is inside {owner} already; wrap a module once, inner modules before outer "
                "ones: put that unit in its place, or wrap one module that contains all its users."
            )
    for param in params:
        if owner := getattr(param.parameter, OWNER, None):
            raise ValueError(
                f"{unit}: parameter {param.name!r} is tied to {owner}, which shards it already. "
                "Wrap one module that contains both (or pass fully_shard or replicate a list of the two), "
                "and neither of the two on its own."
            )


def _place(params: Iterable[Param], owned: Owned, config: UnitConfig) -> None:
    """Move what is on CPU to the unit's device; parameters not if they are offloaded."""
    if config.device is None:
        return
    wanted, remedy = "device_id", "move the module there or to CPU first, or leave device_id out"
    if config.dtensor:
        wanted, remedy = "the device of the mesh", "move the module there or to CPU first"
    for param in params:
        found = param.parameter.device
        if found.type not in ("cpu", "meta") and found != config.device:
            raise ValueError(
                f"{config.name}: parameter {param.name!r} is on {found}, but {wanted} is "
                f"{config.device}; {remedy}."
            )
        if found.type == "cpu" and not config.offload:
            param.parameter.data = param.parameter.data.to(config.device)
    for _, buffer in _buffers(owned):
        if not buffer.is_meta and buffer not in config.ignored.parameters:
            buffer.data = buffer.data.to(config.device)


def _compute_device(params: Iterable[Param], config: UnitConfig) -> torch.device:
    if config.device or config.dtensor:
        return config.device or torch.device("cpu")
    return device_of((param.parameter for param in params), config.mesh.process_group)


def _own_modules(modules: Sequence[nn.Module], skip: Callable[[nn.Module], bool]) -> Owned:
    """Return `modules` and those below them by name, once, without what `skip` picks and all below that."""
    seen = {module for root in modules for module in parents_first(root) if skip(module)}
    prefixes = [""] if len(modules) == 1 else map(str, range(len(modules)))
    return [
        found
        for prefix, module in zip(prefixes, modules, strict=True)
        for found in module.named_modules(seen, prefix)
    ]


def _buffers(owned: Owned) -> Iterator[tuple[ParamRef, Tensor]]:
    for _, module in owned:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield ParamRef(module, name), buffer


def _collect(owned: Owned, ignored: Collection[nn.Parameter]) -> tuple[Param, ...]:
    """Return one `Param` per distinct parameter that the modules hold directly and that is not `ignored`."""
    names: dict[nn.Parameter, str] = {}
    refs: dict[nn.Parameter, list[ParamRef]] = {}
    for module_name, module in owned:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            full_name = joined(module_name, name)
            if is_lazy(parameter):
                raise ValueError(f"parameter {full_name!r} has no shape yet; run a forward before wrapping.")
            names.setdefault(parameter, full_name)
            refs.setdefault(parameter, []).append(ParamRef(module, name))
    return tuple(Param(name, p, tuple(refs[p]), p.shape) for p, name in names.items())


def _check(params: Sequence[Param], config: UnitConfig) -> None:
    """Raise ValueError for parameters that cannot lie in one shard, with their names and the remedy."""
    for param in params:
        _check_one(param, config)
    _check_uniform(params, config, "dtype", "convert the module to one dtype first")
    _check_uniform(params, config, "device", "move the module to one device first")
    if not config.use_orig_params:
        remedy = "pass use_orig_params=True, or wrap the frozen modules on their own"
        _check_uniform(params, config, "requires_grad", remedy)


def _check_one(param: Param, config: UnitConfig) -> None:
    parameter = param.parameter
    where = f"{config.name}: parameter {param.name!r}"
    remedy = "Pass it in ignored_states (fully_shard, replicate: ignored_params)."
    held = local_of(parameter) if config.dtensor else parameter.data
    if isinstance(held, DTensor):
        raise NotImplementedError(
            f"{where} is a DTensor, which FullyShardedDataParallel does not shard any further: a flat shard "
            "holds pieces of plain tensors. Shard what tensor parallelism has divided by fully_shard, over "
            "another axis of the same mesh, or ignore it."
        )
    if type(held) is not Tensor:
        raise NotImplementedError(
            f"{where} is a {type(held).__name__}; a shard holds plain tensors only. {remedy}"
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"{where} has dtype {parameter.dtype}; only floating-point parameters are sharded. {remedy}"
        )
    if config.dtensor and config.mesh.shard and not param.shape:
        raise ValueError(
            f"{where} is 0-dim and cannot be sharded; give it the shape (1,), or pass it in ignored_params."
        )


def _check_uniform(params: Sequence[Param], config: UnitConfig, what: str, remedy: str) -> None:
    """Raise ValueError that names one parameter of each kind when the attribute `what` differs."""
    examples: dict[object, str] = {}
    for param in params:
        examples.setdefault(getattr(param.parameter, what), param.name)
    if len(examples) > 1:
        found = ", ".join(f"{name!r} has {value}" for value, name in examples.items())
        raise ValueError(
            f"{config.name}: the parameters of one unit must agree in {what}, but {found}; {remedy}."
        )


def full_precision_in_eval(argument: object) -> bool:
    """Return `argument`, or for None the setting in the environment; raise TypeError for what is no bool."""
    if argument is None:
        return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
    if not isinstance(argument, bool):
        raise TypeError(f"full_precision_in_eval: expected True, False or None, got {argument!r}")
    return argument


def check_type(kind: type, expected: str, given: object) -> None:
    """Raise TypeError, in words that begin with `expected`, for another type; torch's own are others, too."""
    found = type(given)
    if not isinstance(given, kind):
        raise TypeError(
            f"{expected} {kind.__name__} of lockstep.engine, got {given!r}, "
            f"a {found.__qualname__} of {found.__module__}."
        )


def check_module(module: object, wrapper: type[nn.Module]) -> None:
    """Raise TypeError or ValueError for what cannot be a unit."""
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


def resolve_ignored(
    module: nn.Module, modules: object, states: object, is_unit: Callable[[nn.Module], bool]
) -> Ignored:
    """Return what `ignored_modules` and `ignored_states` mean; warn if `module`, to be wrapped, is ignored.

    Raises:
        ValueError: If both are given or a unit (`is_unit`) is named itself; one below them stays a unit.
        TypeError: For anything but an iterable of modules (or, in `states`, of parameters).
    """
    if modules is not None and states is not None:
        raise ValueError(
            "ignored_modules and ignored_states are both given; put all modules and parameters into "
            "ignored_states. (Units made by auto_wrap_policy have the outer unit's ignored_states already.)"
        )
    given = _listed("ignored_modules: expected a list of modules", modules, nn.Module)
    either = "ignored_states: expected a list of modules or parameters"
    given += _listed(either, states, nn.Module | nn.Parameter)
    named = [one for one in given if isinstance(one, nn.Module)]
    for unit in filter(is_unit, named):
        raise ValueError(
            f"ignored_modules, ignored_states: they contain {type(unit).__name__}"
            f"({type(next(unit.children(), None)).__name__}), which shards its parameters already; "
            "ignore what is not wrapped, or do not wrap it."
        )
    below = frozenset(below for _, below in _own_modules(named, is_unit))
    if module in below:
        warnings.warn(
            f"FullyShardedDataParallel({type(module).__name__}): the module is itself in ignored_modules, so "
            "nothing of it is sharded; ignore modules below it, or do not wrap it.",
            UserWarning,
            stacklevel=3,
        )
    parameters = {p for p in given if isinstance(p, nn.Parameter)}
    return Ignored(below, frozenset(parameters.union(p for m in below for p in m.parameters(recurse=False))))


def ignored_parameters(front: str, given: object) -> Ignored:
    """Return what `ignored_params` of `front` names; raise TypeError for anything but parameters."""
    expected = f"{front}: ignored_params: expected a set of parameters"
    return Ignored(parameters=frozenset(_listed(expected, given, nn.Parameter)))


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
