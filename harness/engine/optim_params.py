"""The parameters of an optimizer, the original parameters in them, and the state of both. Runs on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine.api import StateDictSettings, StateDictType
from harness.engine.layout import Piece
from harness.engine.param import FLAT, LocalShard, clean_name, joined
from harness.engine.state_dict import signature
from harness.engine.unit import Unit

State = dict[str, Any]
"""The state that an optimizer keeps for one parameter: tensors and other values by their names."""


@dataclass(frozen=True)
class OriginalParam:
    """A parameter of the unsharded model, and the slice of it that this rank holds."""

    name: str
    shape: torch.Size
    piece: Piece

    def slice_of(self, shard: Tensor) -> Tensor:
        """Return a view of this rank's slice (1-D) in a tensor with the layout of the group's shard."""
        return shard[self.piece.shard_start : self.piece.shard_stop]

    @property
    def is_reported_here(self) -> bool:
        """Whether this rank, which holds the first element, reports the state to the others.

        No rank does for a parameter without elements: only a flat parameter has state of one, and the
        contents of a checkpoint should not depend on that.
        """
        return self.piece.start == 0 and len(self.piece) > 0


@dataclass(frozen=True)
class FlatSlice:
    """This rank's slice (1-D) of a state tensor that is sharded as its original parameter is."""

    values: Tensor


@dataclass(frozen=True)
class OptimParam:
    """A parameter that an optimizer may have, and the originals in it.

    Attributes:
        shard: The shard that it is part of. None: it is in no unit, and not sharded.
    """

    name: str
    parameter: nn.Parameter
    originals: tuple[OriginalParam, ...]
    shard: LocalShard | None

    @property
    def is_flat(self) -> bool:
        return self.shard is not None and self.parameter is self.shard.flat

    @property
    def is_reshaped(self) -> bool:
        """Whether the parameter has another shape than the original one."""
        return self.shard is not None and (self.is_flat or not self.shard.whole)

    def split(self, state: State) -> dict[str, State]:
        """Return the state of each original parameter, with a `FlatSlice` of what is sharded."""
        for name, value in state.items():
            scalar = not isinstance(value, Tensor) or not value.dim()
            if self.is_reshaped and not scalar and not self._is_sharded(value):
                raise NotImplementedError(
                    f"optim_state_dict: {name!r} of {self.name!r} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(self.parameter.shape)}; it is not known how to shard it. "
                    "Use LOCAL_STATE_DICT."
                )

        def part(value: Any, original: OriginalParam) -> Any:
            if not self._is_sharded(value):
                return value
            return FlatSlice(original.slice_of(value) if self.is_flat else value.reshape(-1))

        return {o.name: {name: part(value, o) for name, value in state.items()} for o in self.originals}

    def join(self, states: Mapping[str, State]) -> State | None:
        """Return the optimizer's state from the result of `split`; None if this rank keeps none.

        A part of a flat parameter without state gets zeros, as if it never had a gradient.
        """
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
            flat = value.values.new_zeros(self.parameter.numel())
            for original, part in values:
                original.slice_of(flat).copy_(part.values)
            return flat
        for original, other in others:
            if not _equal(value, other):
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
    def kind(self) -> StateDictType:
        return self.settings.state_dict_type

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
        if self.kind is StateDictType.LOCAL_STATE_DICT:
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
    sharded = [(prefix, unit.group.shard) for prefix, unit in units if unit.group]
    for prefix, shard in sharded:
        originals = tuple(
            OriginalParam(joined(prefix, param.name), param.shape, piece)
            for param, piece in zip(shard.params, shard.pieces, strict=True)
        )
        shards.append((shard, originals))
        if not shard.config.use_orig_params:
            params[shard.flat] = OptimParam(joined(prefix, FLAT), shard.flat, originals, shard)
            continue
        for param, original in zip(shard.params, originals, strict=True):
            params[param.parameter] = OptimParam(original.name, param.parameter, (original,), shard)
    for name, parameter in model.named_parameters():
        if parameter not in params:
            whole = OriginalParam(clean_name(name), parameter.shape, Piece(0, parameter.numel(), 0))
            params[parameter] = OptimParam(whole.name, parameter, (whole,), None)
    default = dist.group.WORLD
    assert default is not None
    outermost = sharded[0][1].config.mesh.groups if sharded else (default,)
    return OptimizerView(optimizer, params, tuple(shards), settings, (group,) if group else outermost)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
