"""An optimizer's state, from under original names back into a sharded optimizer. Runs on ranks."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.engine import collectives, dtensor
from harness.engine.optimizer_places import Laid, OptimizerView, Original, Place, State
from harness.engine.optimizer_save import SHARDS, options_of
from harness.engine.state_dict import SAME_SHARD
from harness.engine.state_policy import StateDictType

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
        return dtensor.whole(value, original.name)
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
