"""The state of a sharded optimizer under original parameter names, saved and loaded. Runs on ranks."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engine import collectives
from harness.engine.api import StateDictType
from harness.engine.local_shard import LocalShard
from harness.engine.optim_params import Laid, OptimizerView, Original, Place, State
from harness.engine.state_dict import SAME_SHARD, as_dtensors, full_tensor

SHARDS = "lockstep_shards"
"""Where a local state dict says whose shards it is about."""


@dataclass(frozen=True)
class _Cut:
    """Stands for a tensor that is cut over the ranks, in what they tell each other of their state."""

    dtype: torch.dtype


@torch.no_grad()
def save(view: OptimizerView, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, which is as the optimizer returned it, under names and in the view's kind.

    A collective; one tensor per parameter of one group is gathered at a time. Tensors are in new memory, on
    CPU if the kind's config says so; those of 0 dimensions are on CPU.
    """
    held = {
        place.name: (place, state_dict["state"][number])
        for own, group in zip(view.groups, state_dict["param_groups"], strict=True)
        for place, number in zip(own, group["params"], strict=True)
        if number in state_dict["state"]
    }
    groups = [
        options_of(group) | {"params": view.names(own)}
        for own, group in zip(view.groups, state_dict["param_groups"], strict=True)
    ]
    if view.kind is StateDictType.LOCAL_STATE_DICT:
        state = {name: _copied(view, state) for name, (_, state) in held.items()}
        return {"state": state, "param_groups": groups, SHARDS: view.signatures()}
    local: dict[str, State] = {}
    for place, state in held.values():
        local |= place.split(state)
    state = _gathered(view, local)
    if not view.keeps:
        return {}
    names = (name for group in groups for name in group["params"])
    return {"state": {name: state[name] for name in names if name in state}, "param_groups": groups}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a param group says beside which parameters it has."""
    return copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})


def _gathered(view: OptimizerView, local: Mapping[str, State]) -> dict[str, State]:
    """Return the state of all original parameters, empty where nobody keeps it, from each rank's own."""
    described = _described(view, local)
    result = {name: _copied(view, state) for name, state in described.items()}
    for shard, originals in view.places.shards:
        states = [described.get(original.name, {}) for original in originals]
        kinds = dict.fromkeys((key, v) for state in states for key, v in state.items() if isinstance(v, _Cut))
        for key, cut in kinds:
            pieces = {
                o: local.get(o.name, {}).get(key)
                for o, state in zip(originals, states, strict=True)
                if state.get(key) == cut
            }
            values = _unsharded(view, shard, originals, pieces, cut)
            for original, value in values.items() if view.keeps else ():
                result[original.name][key] = value
    return result


def _described(view: OptimizerView, local: Mapping[str, State]) -> dict[str, State]:
    """Return the state of all original parameters with `_Cut` for what is cut, the same on all ranks.

    Each rank tells of the parameters whose first element it holds, as only some ranks know each one.
    """
    sharded = {original.name for _, originals in view.places.shards for original in originals}
    described = {name: state for name, state in local.items() if name not in sharded}
    for world in dict.fromkeys(shard.settings.axes.process_group for shard, _ in view.places.shards):
        mine = {
            original.name: _description(local[original.name])
            for shard, originals in view.places.shards
            for original in originals
            if shard.settings.axes.process_group is world
            and original.is_described_here
            and original.name in local
        }
        for part in collectives.gather_objects(mine, world):
            described |= part
    return described


def _description(state: State) -> State:
    def describe(value: Any) -> Any:
        if isinstance(value, Laid):
            return _Cut(value.piece.dtype)
        return value.cpu() if isinstance(value, Tensor) else value

    return {key: describe(value) for key, value in state.items()}


def _unsharded(
    view: OptimizerView,
    shard: LocalShard,
    originals: Sequence[Original],
    pieces: Mapping[Original, Laid | None],
    cut: _Cut,
) -> dict[Original, Tensor]:
    """Return what the ranks' ``pieces`` of some ``originals`` of one group are together."""
    flat = torch.zeros(shard.layout.shard_numel, dtype=cut.dtype, device=shard.flat.device)
    for original, laid in pieces.items():
        if laid is not None:
            original.of(flat).copy_(laid.piece)
    gathered = shard.in_full(shard.gather(flat))
    values = [full for original, full in zip(originals, gathered, strict=True) if original in pieces]
    if view.kind is StateDictType.SHARDED_STATE_DICT:
        values = list(as_dtensors(values, shard))
    return dict(zip(pieces, (_placed(view, value) for value in values), strict=True))


def _copied(view: OptimizerView, state: State) -> State:
    """Return a copy of what is not cut, with the same keys in the same order."""
    return {
        key: _placed(view, value.clone()) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _placed(view: OptimizerView, tensor: Tensor) -> Tensor:
    return tensor.cpu() if view.settings.optim_state_dict_config.offload_to_cpu else tensor


_ONE_NUMBER = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number per parameter, whatever the parameter's shape."""


@torch.no_grad()
def load(view: OptimizerView, state_dict: Mapping[str, Any], named: bool) -> dict[str, Any]:
    """Return ``state_dict``, of any wrapping and world size or none, as the optimizer loads it.

    A collective; one tensor of one parameter is made full at a time. With rank0_only ``state_dict`` is rank
    0's and empty elsewhere. Keys are numbers, or the parameters' names here if ``named``.
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
    places = [place for own in view.groups for place in own]
    states = _states(view, given, state_dict.get("state", {}), places)
    keys = {place.name: place.name if named else number for number, place in enumerate(places)}
    for own, group in zip(view.groups, groups, strict=True):
        group["params"] = [keys[place.name] for place in own]
    return {
        "state": {keys[name]: state for name, state in states.items() if state is not None},
        "param_groups": groups,
    }


def _states(
    view: OptimizerView, given: Mapping[str, Any], source: Mapping[str, State], places: Sequence[Place]
) -> dict[str, State | None]:
    """Return what the optimizer keeps for each of ``places``, None for nothing."""
    if view.kind is StateDictType.LOCAL_STATE_DICT:
        return _local(view, given, places)
    pieces = _pieces(view, given["state"], source)
    return {place.name: place.join(pieces) for place in places}


def _without_elements(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks must know before tensors are sent: on the meta device, but for single numbers."""

    def bare(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) and value.dim() else value

    state = state_dict.get("state", {})
    bares = {name: {key: bare(value) for key, value in one.items()} for name, one in state.items()}
    return {**state_dict, "state": bares} if state_dict else {}


def _options(view: OptimizerView, saved: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield, for each param group of the optimizer, the options that its parameters were saved with."""
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    wanted = [name for own in view.groups for name in view.names(own)]
    _refuse_difference(wanted, home)
    for number, own in enumerate(view.groups):
        names = view.names(own)
        homes = {home[name] for name in names}
        if len(homes) > 1:
            raise ValueError(
                f"optim_state_dict_to_load: param group {number} of the optimizer holds parameters of the "
                f"saved groups {sorted(homes)}; make the optimizer with the param groups it was saved with."
            )
        group = view.optimizer.param_groups[number]
        options = options_of(saved[homes.pop()] if homes else group)
        yield options | {k: list(v) for k, v in group.items() if k == "param_names"}


def _refuse_difference(wanted: Collection[str], saved: Collection[str]) -> None:
    missing = [name for name in wanted if name not in saved]
    unexpected = sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            "optim_state_dict_to_load: the state is of other parameters than the optimizer's. Missing: "
            f"{missing}. Unexpected: {unexpected}."
        )


def _local(view: OptimizerView, given: Mapping[str, Any], places: Sequence[Place]) -> dict[str, State | None]:
    if given.get(SHARDS) != view.signatures():
        raise ValueError(
            f"optim_state_dict_to_load: this rank holds {view.signatures()}, and was given "
            f"{given.get(SHARDS)}. {SAME_SHARD}"
        )
    own = {place.name for place in places}
    return {name: copy.deepcopy(state) for name, state in given["state"].items() if name in own}


def _pieces(view: OptimizerView, given: Mapping[str, State], source: Mapping[str, State]) -> dict[str, State]:
    """Return this rank's part of each original parameter's state. ``source``: rank 0's, with elements."""
    numbers = _one_number_keys(view, given)
    pieces: dict[str, State] = {}
    for place in (place for own in view.groups for place in own):
        for original in (o for o in place.originals if o.name in given):
            pieces[original.name] = {}
            for key, value in given[original.name].items():
                if isinstance(value, Tensor):
                    rank_0s = source.get(original.name, {}).get(key)
                    full = _full(view, place, original, value, rank_0s)
                    value = _part(place, original, full, f"{key!r} of {original.name!r}", key in numbers)
                pieces[original.name][key] = value
    return pieces


def _one_number_keys(view: OptimizerView, given: Mapping[str, State]) -> set[str]:
    """Return what is kept as one number per parameter; with 0-dim parameters alone shapes cannot tell."""
    shapes = {o.name: o.shape for own in view.groups for place in own for o in place.originals}
    seen = [
        (key, value.dim() == 0)
        for name, state in given.items()
        if shapes.get(name)
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]
    return {key for key, single in seen if single} | (_ONE_NUMBER - {key for key, _ in seen})


def _full(
    view: OptimizerView, place: Place, original: Original, value: Tensor, source: Tensor | None
) -> Tensor:
    """Return ``value`` with all its elements: from its `DTensor`, or from rank 0 if it came without."""
    if not value.is_meta:
        return full_tensor(value, original.name)
    device = place.shard.device if place.shard else place.parameter.device
    wire = torch.empty(value.shape, dtype=value.dtype, device=device) if source is None else source.to(device)
    collectives.broadcast([wire], view.world)
    return wire


def _part(place: Place, original: Original, full: Tensor, what: str, one_number: bool) -> Laid | Tensor:
    """Return what this rank keeps of ``full``, in memory of its own."""
    if place.shard is None or (full.dim() == 0 and (original.shape or one_number)):
        return full.clone()
    if full.shape == original.shape:
        piece = full.reshape(-1)[original.piece.start : original.piece.stop]
        return Laid(piece.to(device=place.parameter.device, copy=True))
    if not place.is_cut:
        return full.clone()
    raise ValueError(
        f"optim_state_dict_to_load: {what} has shape {tuple(full.shape)}, the parameter "
        f"{tuple(original.shape)}; load the state of the same model."
    )
