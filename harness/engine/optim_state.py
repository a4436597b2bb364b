"""The state of a sharded optimizer under original parameter names, saved and loaded. Runs on ranks."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engine import collectives
from harness.engine.api import StateDictType
from harness.engine.optim_params import FlatSlice, OptimizerView, OptimParam, OriginalParam, State
from harness.engine.state_dict import SAME_SHARD, as_dtensors, full_tensor

SHARDS = "lockstep_shards"
"""The key of the signatures of all shards in a local state dict."""

_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number per parameter, whatever the parameter's shape."""


@dataclass(frozen=True)
class _ShardedTensor:
    """Stands for a sharded tensor in the state that ranks report to each other."""

    dtype: torch.dtype


@torch.no_grad()
def save(view: OptimizerView, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's `state_dict` under parameter names and of the view's kind.

    A collective; it gathers one state tensor per parameter of one group at a time. Tensors are in new memory,
    and on CPU if they are 0-dim or the config says so.
    """
    held = {
        param.name: (param, state_dict["state"][number])
        for own, group in zip(view.groups, state_dict["param_groups"], strict=True)
        for param, number in zip(own, group["params"], strict=True)
        if number in state_dict["state"]
    }
    groups = [
        _options_of(group) | {"params": view.names(own)}
        for own, group in zip(view.groups, state_dict["param_groups"], strict=True)
    ]
    if view.kind is StateDictType.LOCAL_STATE_DICT:
        state = {name: _copied(view, state) for name, (_, state) in held.items()}
        return {"state": state, "param_groups": groups, SHARDS: view.signatures()}
    local: dict[str, State] = {}
    for param, state in held.values():
        local |= param.split(state)
    state = _gathered(view, local)
    if not view.is_destination:
        return {}
    names = (name for group in groups for name in group["params"])
    return {"state": {name: state[name] for name in names if name in state}, "param_groups": groups}


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
            if view.kind is StateDictType.SHARDED_STATE_DICT:
                values = [*as_dtensors(values, shard)]
            for original, value in zip(slices, values, strict=True) if view.is_destination else ():
                result[original.name][key] = _offloaded(view, value)
    return result


def _reported(view: OptimizerView, local: Mapping[str, State]) -> dict[str, State]:
    """Return the state of all original parameters with `_ShardedTensor` for what is sharded.

    The ranks gather it, as each one knows the state of the parameters alone of which it holds a part.
    """
    worlds = {o.name: shard.config.mesh.process_group for shard, originals in view.shards for o in originals}
    reported_here = {o.name for _, originals in view.shards for o in originals if o.is_reported_here}
    result = {name: state for name, state in local.items() if name not in worlds}
    for world in dict.fromkeys(worlds.values()):
        names = [name for name in local if worlds.get(name) is world and name in reported_here]
        for part in collectives.gather_objects({name: _report(local[name]) for name in names}, world):
            result |= part
    return result


def _report(state: State) -> State:
    def report(value: Any) -> Any:
        if isinstance(value, FlatSlice):
            return _ShardedTensor(value.values.dtype)
        return value.cpu() if isinstance(value, Tensor) else value

    return {key: report(value) for key, value in state.items()}


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
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            f"optim_state_dict_to_load: expected the keys 'state' and 'param_groups', got {list(given)}. "
            "Pass what optim_state_dict returned, on every rank or, with rank0_only, on rank 0."
        )
    groups = list(_options(view, given["param_groups"]))
    params = [param for own in view.groups for param in own]
    states: Mapping[str, State | None]
    if view.kind is StateDictType.LOCAL_STATE_DICT:
        states = _local(view, given, params)
    else:
        slices = _slices(view, given["state"], state_dict.get("state", {}), params)
        states = {param.name: param.join(slices) for param in params}
    keys = {param.name: param.name if named else number for number, param in enumerate(params)}
    for own, group in zip(view.groups, groups, strict=True):
        group["params"] = [keys[param.name] for param in own]
    return {
        "state": {keys[name]: state for name, state in states.items() if state is not None},
        "param_groups": groups,
    }


def _without_elements(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with its tensors on the meta device, except 0-dim ones.

    This is what all ranks need before rank 0 broadcasts one tensor after the other.
    """

    def bare(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) and value.dim() else value

    state = state_dict.get("state", {})
    bares = {name: {key: bare(value) for key, value in one.items()} for name, one in state.items()}
    return {**state_dict, "state": bares} if state_dict else {}


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


def _local(view: OptimizerView, given: Mapping[str, Any], params: Sequence[OptimParam]) -> dict[str, State]:
    if given.get(SHARDS) != view.signatures():
        raise ValueError(
            f"optim_state_dict_to_load: this rank holds {view.signatures()}, and was given "
            f"{given.get(SHARDS)}. {SAME_SHARD}"
        )
    own = {param.name for param in params}
    return {name: copy.deepcopy(state) for name, state in given["state"].items() if name in own}


def _slices(
    view: OptimizerView,
    given: Mapping[str, State],
    source: Mapping[str, State],
    params: Sequence[OptimParam],
) -> dict[str, State]:
    """Return this rank's part of each original parameter's state.

    `given` may be on the meta device; `source` is then rank 0's state with its elements.
    """
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
    """Return the keys of state with one number per parameter.

    The shapes of state tell, except where all parameters are 0-dim.
    """
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
    elements = torch.empty(value.shape, dtype=value.dtype) if elements is None else elements
    buffer = elements.to(device)
    collectives.broadcast([buffer], view.world)
    return buffer


def _part(param: OptimParam, original: OriginalParam, full: Tensor, key: str, scalar: bool) -> Any:
    """Return what this rank keeps of `full`, in new memory."""
    if param.shard is None or scalar:
        return full.clone()
    if full.shape == original.shape:
        values = full.reshape(-1)[original.piece.start : original.piece.stop]
        return FlatSlice(values.to(device=param.parameter.device, copy=True))
    if not param.is_reshaped:
        return full.clone()
    raise ValueError(
        f"optim_state_dict_to_load: {key!r} of {original.name!r} has shape {tuple(full.shape)}, the "
        f"parameter {tuple(original.shape)}; load the state of the same model."
    )
