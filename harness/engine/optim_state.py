"""The state of a sharded optimizer under original parameter names, saved and loaded. Runs on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engine import collectives
from lockstep.engine.api import StateDictSettings, StateDictType
from lockstep.engine.layout import Piece
from lockstep.engine.param import FLAT, LocalShard, joined
from lockstep.engine.state_dict import SAME_SHARD, as_dtensors, full_tensor, signature
from lockstep.engine.torch_internals import CHECKPOINTED
from lockstep.engine.unit import Unit

State = dict[str, Any]
"""The state that an optimizer keeps for one parameter: tensors and other values by their names."""

SHARDS = "lockstep_shards"
"""The key of the signatures of all shards in a local state dict."""

_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that torch's optimizers keep as one number per parameter, whatever the parameter's shape."""


@dataclass(frozen=True)
class OriginalParam:
    """A parameter of the unsharded model, and the slice of it that this rank holds."""

    name: str
    shape: torch.Size
    piece: Piece

    def slice_of(self, shard: Tensor) -> Tensor:
        """Return a view of this rank's slice (1-D) in a tensor with the layout of the group's shard."""
        return shard[self.piece.shard_start : self.piece.shard_stop]


@dataclass(frozen=True)
class FlatSlice:
    """This rank's slice (1-D) of a state tensor that is sharded as its original parameter is."""

    values: Tensor


@dataclass(frozen=True)
class _ShardedTensor:
    """Stands for a sharded tensor in the state that ranks report to each other."""

    dtype: torch.dtype


@dataclass(frozen=True)
class OptimParam:
    """A parameter that an optimizer may have, and the originals in it."""

    name: str  # as the model here has it, modules of activation checkpointing included
    parameter: nn.Parameter
    originals: tuple[OriginalParam, ...]
    shard: LocalShard | None  # that it is part of; None: it is in no unit, and not sharded

    @property
    def is_flat(self) -> bool:
        return self.shard is not None and self.parameter is self.shard.flat

    @property
    def is_reshaped(self) -> bool:
        """Whether the parameter has another shape than the original one."""
        return self.shard is not None and (self.is_flat or not self.shard.whole)

    def split(self, state: State) -> dict[str, State]:
        """Return the state of each original parameter, with a `FlatSlice` of what is sharded."""
        states = {original.name: dict(state) for original in self.originals}
        for name, value in state.items():
            if self._is_sharded(value):
                for original in self.originals:
                    values = original.slice_of(value) if self.is_flat else value.reshape(-1)
                    states[original.name][name] = FlatSlice(values)
            elif self.is_reshaped and isinstance(value, Tensor) and value.dim():
                raise NotImplementedError(
                    f"optim_state_dict: {name!r} of {self.name!r} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(self.parameter.shape)}; it is not known how to shard it. "
                    "Use LOCAL_STATE_DICT."
                )
        return states

    def join(self, states: Mapping[str, State]) -> State | None:
        """Return the optimizer's state from the result of `split`; None if this rank keeps none."""
        held = [(o, states[o.name]) for o in self.originals if o.name in states]
        if not self.is_flat:
            # A rank that holds nothing of a parameter never steps it, and keeps nothing for it.
            held = [(o, state) for o, state in held if len(o.piece) or not self.is_reshaped]
        names = dict.fromkeys(name for _, state in held for name in state)
        joined = {n: self._join_one(n, [(o, state[n]) for o, state in held if n in state]) for n in names}
        return joined if held else None

    def _is_sharded(self, value: object) -> bool:
        """Return whether `value` has one element for each element of a sharded parameter."""
        if self.shard is None or not isinstance(value, Tensor):
            return False
        return value.dim() > 0 and value.shape == self.parameter.shape

    def _join_one(self, name: str, values: Sequence[tuple[OriginalParam, Any]]) -> Any:
        (first, value), *others = values
        if isinstance(value, FlatSlice):
            if not self.is_flat:
                return value.values.view_as(self.parameter)
            # A part without state gets zeros, as if it never had a gradient.
            flat = value.values.new_zeros(self.parameter.numel())
            for original, part in values:
                original.slice_of(flat).copy_(part.values)
            return flat
        for original, other in others:
            if not (type(value) is type(other) and value == other):  # tensors here are 0-dim
                raise ValueError(
                    f"optim_state_dict_to_load: {name!r} is {value!r} for {first.name!r} and {other!r} for "
                    f"{original.name!r}, but {self.name!r} holds both and has one; pass use_orig_params=True."
                )
        return value


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer, and all parameters of a model that it may have.

    Attributes:
        shards: The shards of all groups, each with its original parameters in order.
        world: The groups whose common first rank is rank 0 of rank0_only.
    """

    optimizer: torch.optim.Optimizer
    params: Mapping[Tensor, OptimParam]
    shards: tuple[tuple[LocalShard, tuple[OriginalParam, ...]], ...]
    settings: StateDictSettings
    world: tuple[dist.ProcessGroup, ...]

    @property
    def is_destination(self) -> bool:
        """Whether this rank keeps the state that is saved."""
        return not self.settings.optim_rank0_only or all(dist.get_rank(group) == 0 for group in self.world)

    @cached_property
    def groups(self) -> list[list[OptimParam]]:
        """The optimizer's parameters, group by group; ValueError if one is not the model's."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self.params:
                    raise ValueError(
                        f"param group {number} of the optimizer has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not one of the model's. Make the optimizer from "
                        "the wrapped model's parameters(); with use_orig_params=False, after wrapping."
                    )
        return [[self.params[parameter] for parameter in g["params"]] for g in self.optimizer.param_groups]

    def names(self, params: Iterable[OptimParam]) -> list[str]:
        """Return the names that a state dict of this kind has for `params`."""
        if self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return [param.name for param in params]
        return [original.name for param in params for original in param.originals]

    def signatures(self) -> dict[str, str]:
        """Return the signatures of all shards by their first parameter."""
        return {originals[0].name: signature(shard) for shard, originals in self.shards}


def view_of(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    units: Sequence[tuple[str, Unit]],
    settings: StateDictSettings,
    group: dist.ProcessGroup | None,
) -> OptimizerView:
    """Return the view of `optimizer` and `model`, whose units are given with their names."""
    params: dict[Tensor, OptimParam] = {}
    shards = []
    for prefix, shard in [(name, unit.group.shard) for name, unit in units if unit.group]:
        originals = tuple(
            OriginalParam(_original_name(joined(prefix, param.name)), param.shape, piece)
            for param, piece in zip(shard.params, shard.pieces, strict=True)
        )
        shards.append((shard, originals))
        if shard.config.use_orig_params:
            for param, original in zip(shard.params, originals, strict=True):
                name = joined(prefix, param.name)
                params[param.parameter] = OptimParam(name, param.parameter, (original,), shard)
        else:
            params[shard.flat] = OptimParam(joined(prefix, FLAT), shard.flat, originals, shard)
    for name, parameter in model.named_parameters():
        if parameter not in params:
            whole = OriginalParam(_original_name(name), parameter.shape, Piece(0, parameter.numel(), 0))
            params[parameter] = OptimParam(name, parameter, (whole,), None)
    default = dist.group.WORLD
    assert default is not None
    outermost = shards[0][0].config.mesh.groups if shards else (default,)
    return OptimizerView(optimizer, params, tuple(shards), settings, (group,) if group else outermost)


def _original_name(name: str) -> str:
    return name.replace(f"{CHECKPOINTED}.", "")  # as modules of activation checkpointing save themselves


@torch.no_grad()
def save(view: OptimizerView, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's `state_dict` under parameter names and of the view's kind.

    A collective; it gathers one state tensor per parameter of one group at a time. Tensors are in new memory,
    and on CPU if they are 0-dim or the config says so.
    """
    held: list[tuple[OptimParam, State]] = []
    groups = []
    numbered = state_dict if "param_groups" in state_dict else view.optimizer.state_dict()
    for own, group in zip(view.groups, numbered["param_groups"], strict=True):
        members = _members(view, own, group["params"])
        groups.append(_options_of(group) | {"params": view.names(members.values())})
        held += [(param, state_dict["state"][n]) for n, param in members.items() if n in state_dict["state"]]
    result = {"param_groups": groups} if "param_groups" in state_dict else {}
    if view.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        state = {param.name: _copied(view, state) for param, state in held}
        return {"state": state, **result, SHARDS: view.signatures()}
    local: dict[str, State] = {}
    for param, state in held:
        local |= param.split(state)
    state = _gathered(view, local)
    if not view.is_destination:
        return {}
    names = {name for group in groups for name in group["params"]}
    # In the model's order, which is that of all ranks: who reads `DTensor`s one by one needs the same.
    ordered = (original.name for param in view.params.values() for original in param.originals)
    return {"state": {name: state[name] for name in ordered if name in state and name in names}, **result}


def _members(view: OptimizerView, own: Sequence[OptimParam], keys: Sequence[Any]) -> dict[Any, OptimParam]:
    """Return the parameters of one param group by their keys in its state dict: numbers, or names here.

    Names are those of optimizers such as torch's `_NamedOptimizer`, which sort them.
    """
    if not any(isinstance(key, str) for key in keys):
        return dict(zip(keys, own, strict=True))
    by_name = {param.name: param for params in view.groups for param in params}
    if unknown := [key for key in keys if key not in by_name]:
        raise ValueError(f"optim_state_dict: the optimizer's state names {unknown}, which the model lacks.")
    return {key: by_name[key] for key in keys}


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group without its parameters."""
    return copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})


def _gathered(view: OptimizerView, local: Mapping[str, State]) -> dict[str, State]:
    """Return the state of all original parameters, from each rank's own in `local`."""
    reported = _reported(view, local)
    result = {name: _copied(view, state) for name, state in reported.items()}
    for shard, originals in view.shards:
        states = [reported.get(original.name, {}) for original in originals]
        # What is gathered together needs one dtype. An optimizer may give parameters different ones.
        kinds = dict.fromkeys(
            (key, v) for state in states for key, v in state.items() if isinstance(v, _ShardedTensor)
        )
        for key, kind in kinds:
            slices = {
                original: local.get(original.name, {}).get(key)
                for original, state in zip(originals, states, strict=True)
                if state.get(key) == kind
            }
            flat = torch.zeros(shard.layout.shard_numel, dtype=kind.dtype, device=shard.flat.device)
            for original, piece in slices.items():
                if piece is not None:
                    original.slice_of(flat).copy_(piece.values)
            gathered = shard.layout.views(shard.gather(flat))
            values = [full for original, full in zip(originals, gathered, strict=True) if original in slices]
            if view.settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
                values = [*as_dtensors(values, shard)]
            for original, value in zip(slices, values, strict=True) if view.is_destination else ():
                result[original.name][key] = _offloaded(view, value)
    return result


def _reported(view: OptimizerView, local: Mapping[str, State]) -> dict[str, State]:
    """Return what all ranks hold of the original parameters, with `_ShardedTensor` for what is sharded."""
    worlds = {o.name: shard.config.mesh.process_group for shard, originals in view.shards for o in originals}
    # The rank with the first element reports. No rank does for a parameter without elements: only a flat
    # parameter has state of one, and the contents of a checkpoint should not depend on that.
    own = {o.name for _, originals in view.shards for o in originals if o.piece.start == 0 and len(o.piece)}
    result = {name: state for name, state in local.items() if name not in worlds}
    for world in dict.fromkeys(worlds.values()):
        report = {
            name: {key: _reported_value(value) for key, value in state.items()}
            for name, state in local.items()
            if worlds.get(name) is world and name in own
        }
        for part in collectives.gather_objects(report, world):
            result |= part
    return result


def _reported_value(value: Any) -> Any:
    if isinstance(value, FlatSlice):
        return _ShardedTensor(value.values.dtype)
    return value.cpu() if isinstance(value, Tensor) else value


def _copied(view: OptimizerView, state: State) -> State:
    return {
        key: _offloaded(view, value.clone()) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _offloaded(view: OptimizerView, tensor: Tensor) -> Tensor:
    return tensor.cpu() if view.settings.optim_state_dict_config.offload_to_cpu else tensor


@torch.no_grad()
def load(view: OptimizerView, state_dict: Mapping[str, Any], named: bool) -> dict[str, Any]:
    """Return `state_dict` in the form that the optimizer loads.

    A collective; it unshards one tensor of one parameter at a time. With rank0_only `state_dict` is rank 0's
    and empty elsewhere. Keys are numbers, or the parameters' names here if `named`.
    """
    given = state_dict
    if view.settings.optim_rank0_only:
        given = collectives.broadcast_object(_without_elements(state_dict), view.world)
    if "state" not in given:
        raise ValueError(
            f"optim_state_dict_to_load: expected the keys 'state' and 'param_groups', got {list(given)}. "
            "Pass what optim_state_dict returned, on every rank or, with rank0_only, on rank 0."
        )
    groups = (
        list(_options(view, given["param_groups"])) if "param_groups" in given else [{} for _ in view.groups]
    )
    params = [param for own in view.groups for param in own]
    states: Mapping[str, State | None]
    if view.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        if given.get(SHARDS) != view.signatures():
            raise ValueError(
                f"optim_state_dict_to_load: this rank holds {view.signatures()}, and was given "
                f"{given.get(SHARDS)}. {SAME_SHARD}"
            )
        own = {param.name for param in params}
        states = {name: copy.deepcopy(state) for name, state in given["state"].items() if name in own}
    else:
        held = {id(param) for param in params}
        # In the model's order: that of an optimizer may differ between ranks, and unsharding is a collective.
        ordered = [param for param in view.params.values() if id(param) in held]
        slices = _slices(view, given["state"], state_dict.get("state", {}), ordered)
        states = {param.name: param.join(slices) for param in params}
    keys = {param.name: param.name if named else number for number, param in enumerate(params)}
    for members, group in zip(view.groups, groups, strict=True):
        group["params"] = [keys[param.name] for param in members]
    kept = {keys[name]: state for name, state in states.items() if state is not None}
    return {"state": kept, "param_groups": groups} if "param_groups" in given else {"state": kept}


def _without_elements(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with its tensors, except 0-dim ones, on meta; rank 0 broadcasts them one by one."""
    state = {
        name: {k: v.to("meta") if isinstance(v, Tensor) and v.dim() else v for k, v in one.items()}
        for name, one in state_dict.get("state", {}).items()
    }
    return {**state_dict, "state": state} if state_dict else {}


def _options(view: OptimizerView, saved: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield, for each param group of the optimizer, the options that its parameters were saved with."""
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    wanted = [name for own in view.groups for name in view.names(own)]
    missing = [name for name in wanted if name not in home]
    unexpected = sorted(home.keys() - set(wanted))
    if missing or unexpected:
        raise ValueError(
            "optim_state_dict_to_load: the state is of other parameters than the optimizer's. Missing: "
            f"{missing}. Unexpected: {unexpected}."
        )
    for number, own in enumerate(view.groups):
        homes = {home[name] for name in view.names(own)}
        if len(homes) > 1:
            raise ValueError(
                f"optim_state_dict_to_load: param group {number} of the optimizer holds parameters of the "
                f"saved groups {sorted(homes)}; make the optimizer with the param groups it was saved with."
            )
        group = view.optimizer.param_groups[number]
        options = _options_of(saved[homes.pop()] if homes else group)
        yield options | {k: list(v) for k, v in group.items() if k == "param_names"}


def _slices(
    view: OptimizerView, given: Mapping[str, State], source: Mapping[str, State], params: Sequence[OptimParam]
) -> dict[str, State]:
    """Return this rank's part of each original parameter's state; `source` has what is on meta in `given`."""
    scalars = _scalar_keys(given, params)
    slices: dict[str, State] = {}
    for param in params:
        for original in (o for o in param.originals if o.name in given):
            slices[original.name] = {}
            for key, value in given[original.name].items():
                if isinstance(value, Tensor):
                    if value.is_meta:
                        full = _broadcast(view, param, value, source.get(original.name, {}).get(key))
                    else:
                        full = full_tensor(value, original.name)
                    value = _part(param, original, full, key, scalar=full.dim() == 0 and key in scalars)
                slices[original.name][key] = value
    return slices


def _scalar_keys(given: Mapping[str, State], params: Sequence[OptimParam]) -> set[str]:
    """Return the keys of state with one number per parameter: shapes show it, unless all are 0-dim."""
    shapes = {original.name: original.shape for param in params for original in param.originals}
    seen = [
        (key, value.dim() == 0)
        for name, state in given.items()
        if shapes.get(name)
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]
    return {key for key, single in seen if single} | (_SCALARS - {key for key, _ in seen})


def _broadcast(view: OptimizerView, param: OptimParam, value: Tensor, elements: Tensor | None) -> Tensor:
    """Return rank 0's `elements` of `value`, which is on the meta device, on all ranks."""
    device = param.shard.device if param.shard else param.parameter.device
    buffer = (torch.empty(value.shape, dtype=value.dtype) if elements is None else elements).to(device)
    collectives.broadcast([buffer], view.world)
    return buffer


def _part(param: OptimParam, original: OriginalParam, full: Tensor, key: str, scalar: bool) -> Any:
    """Return what this rank keeps of `full`, in new memory."""
    if param.shard is not None and full.shape == original.shape and not scalar:
        values = full.reshape(-1)[original.piece.start : original.piece.stop]
        return FlatSlice(values.to(device=param.parameter.device, copy=True))
    if scalar or not param.is_reshaped:
        return full.clone()
    raise ValueError(
        f"optim_state_dict_to_load: {key!r} of {original.name!r} has shape {tuple(full.shape)}, the "
        f"parameter {tuple(original.shape)}; load the state of the same model."
    )
