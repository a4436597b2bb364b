"""Which original parameters an optimizer's parameter stands for, and their state in its state. On ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine.api import StateDictSettings, StateDictType
from harness.engine.layout import Piece
from harness.engine.local_shard import LocalShard
from harness.engine.param import FLAT, clean_name, joined
from harness.engine.state_dict import signature
from harness.engine.unit import Unit

State = dict[str, Any]
"""What an optimizer keeps for one parameter: tensors and other values by their names."""


@dataclass(frozen=True)
class Original:
    """One original parameter: its name and shape in the unsharded model, and what this rank holds of it."""

    name: str
    shape: torch.Size
    piece: Piece

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's piece (1-D) of what lies in ``flat`` as the group's shard does."""
        return flat[self.piece.shard_start : self.piece.shard_stop]

    @property
    def is_described_here(self) -> bool:
        """Whether this rank holds the first element, and so tells the others of the state.

        Nobody does for a parameter without elements: only a flat parameter has any state of it, and what a
        checkpoint contains should not depend on that.
        """
        return self.piece.start == 0 and len(self.piece) > 0


@dataclass(frozen=True)
class Laid:
    """State of an original parameter that is cut as the parameter is: this rank's 1-D ``piece`` of it."""

    piece: Tensor


@dataclass(frozen=True)
class Place:
    """One parameter that an optimizer may have. ``shard`` None: no unit holds it, and nothing is cut."""

    name: str
    parameter: nn.Parameter
    originals: tuple[Original, ...]
    shard: LocalShard | None

    @property
    def is_flat(self) -> bool:
        return self.shard is not None and self.parameter is self.shard.flat

    @property
    def is_cut(self) -> bool:
        """Whether the parameter has another shape than the original one."""
        return self.shard is not None and (self.is_flat or not self.shard.whole)

    def split(self, state: State) -> dict[str, State]:
        """Return the state of each original parameter, with what lies as the parameter does `Laid`."""
        for name, value in state.items():
            if self.is_cut and isinstance(value, Tensor) and value.dim() and not self._lies(value):
                raise NotImplementedError(
                    f"optim_state_dict: {name!r} of {self.name!r} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(self.parameter.shape)}; it is not known how to cut it. "
                    "Use LOCAL_STATE_DICT."
                )
        return {original.name: self._split_one(original, state) for original in self.originals}

    def join(self, states: Mapping[str, State]) -> State | None:
        """Return what the optimizer keeps, from what `split` returned; None if that is nothing here.

        A part of a flat parameter that has no state gets zeros, as if it had never had a gradient.
        """
        held = [(o, states[o.name]) for o in self.originals if o.name in states]
        if not self.is_flat:
            # A rank that holds nothing of a parameter never steps it, and keeps nothing for it.
            held = [(o, state) for o, state in held if len(o.piece) or not self.is_cut]
        names = dict.fromkeys(name for _, state in held for name in state)
        joined = {n: self._join_one(n, [(o, state[n]) for o, state in held if n in state]) for n in names}
        return joined if held else None

    def _split_one(self, original: Original, state: State) -> State:
        def part(value: Any) -> Any:
            if not self._lies(value):
                return value
            return Laid(original.of(value) if self.is_flat else value.reshape(-1))

        return {name: part(value) for name, value in state.items()}

    def _lies(self, value: object) -> bool:
        """Tell whether ``value`` has one element for each of the parameter's, and there is a shard to cut."""
        if self.shard is None or not isinstance(value, Tensor):
            return False
        return value.dim() > 0 and value.shape == self.parameter.shape

    def _join_one(self, name: str, values: Sequence[tuple[Original, Any]]) -> Any:
        (first, value), *others = values
        if isinstance(value, Laid):
            if not self.is_flat:
                return value.piece.view_as(self.parameter)
            flat = value.piece.new_zeros(self.parameter.numel())
            for original, part in values:
                original.of(flat).copy_(part.piece)
            return flat
        for original, other in others:
            if not _equal(value, other):
                raise ValueError(
                    f"optim_state_dict_to_load: {name!r} is {value!r} for {first.name!r} and {other!r} for "
                    f"{original.name!r}, but {self.name!r} holds both and has one; pass use_orig_params=True."
                )
        return value


@dataclass(frozen=True)
class Places:
    """All parameters of a model that an optimizer may have, and the originals of each shard, by entry."""

    by_parameter: Mapping[Tensor, Place]
    shards: tuple[tuple[LocalShard, tuple[Original, ...]], ...]


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer of parameters in ``places``. ``world``: the rank that is first in all of it is rank 0."""

    places: Places
    optimizer: torch.optim.Optimizer
    settings: StateDictSettings
    world: tuple[dist.ProcessGroup, ...]

    @property
    def kind(self) -> StateDictType:
        return self.settings.state_dict_type

    @property
    def keeps(self) -> bool:
        """Whether this rank gets the state that it helps to make."""
        return not self.settings.optim_rank0_only or all(dist.get_rank(group) == 0 for group in self.world)

    @cached_property
    def groups(self) -> list[list[Place]]:
        """The places of the optimizer's parameters, group by group; ValueError if one has none."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self.places.by_parameter:
                    raise ValueError(
                        f"param group {number} of the optimizer has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not one of the model's. Make the optimizer from "
                        "the wrapped model's parameters(); with use_orig_params=False, after wrapping."
                    )
        return [
            [self.places.by_parameter[p] for p in group["params"]] for group in self.optimizer.param_groups
        ]

    def names(self, places: Iterable[Place]) -> list[str]:
        """Return how a state dict of this kind calls what ``places`` hold."""
        if self.kind is StateDictType.LOCAL_STATE_DICT:
            return [place.name for place in places]
        return [original.name for place in places for original in place.originals]

    def signatures(self) -> dict[str, str]:
        """Say of each group, by its first parameter, which part of it this rank holds."""
        return {originals[0].name: signature(shard) for shard, originals in self.places.shards}


def find_places(model: nn.Module, units: Iterable[tuple[str, Unit]]) -> Places:
    """Return the places of ``model``, whose units are given with their names."""
    places: dict[Tensor, Place] = {}
    shards = []
    for prefix, unit in units:
        if not unit.group:
            continue
        shard = unit.group.shard
        originals = tuple(
            Original(joined(prefix, entry.name), entry.shape, piece)
            for entry, piece in zip(shard.params, shard.pieces, strict=True)
        )
        shards.append((shard, originals))
        if not shard.settings.use_orig_params:
            places[shard.flat] = Place(joined(prefix, FLAT), shard.flat, originals, shard)
            continue
        for entry, original in zip(shard.params, originals, strict=True):
            places[entry.parameter] = Place(original.name, entry.parameter, (original,), shard)
    for name, parameter in model.named_parameters():
        if parameter not in places:
            everything = Original(clean_name(name), parameter.shape, Piece(0, parameter.numel(), 0))
            places[parameter] = Place(everything.name, parameter, (everything,), None)
    return Places(places, tuple(shards))


def world_of(units: Iterable[tuple[str, Unit]]) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of the outermost unit that has parameters, else the default one."""
    default = dist.group.WORLD
    assert default is not None
    return next((unit.group.settings.axes.groups for _, unit in units if unit.group), (default,))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
