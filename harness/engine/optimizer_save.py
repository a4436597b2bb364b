"""An optimizer's state under the names of original parameters. Runs on ranks."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engine import collectives, dtensor
from harness.engine.optimizer_places import Laid, OptimizerView, Original, State
from harness.engine.shard import LocalShard
from harness.engine.state_policy import StateDictType

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
            values = _full(view, shard, originals, pieces, cut)
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


def _full(
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
        values = list(dtensor.cut(values, shard))
    return dict(zip(pieces, (_placed(view, value) for value in values), strict=True))


def _copied(view: OptimizerView, state: State) -> State:
    """Return a copy of what is not cut, with the same keys in the same order."""
    return {
        key: _placed(view, value.clone()) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _placed(view: OptimizerView, tensor: Tensor) -> Tensor:
    return tensor.cpu() if view.settings.optim_state_dict_config.offload_to_cpu else tensor
