"""Tensors that modules see in place of their shards while they save, load or are summoned. Runs on ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lockstep.engine import collectives
from lockstep.engine.api import GroupState, ShardingStrategy
from lockstep.engine.gradients import VisibleGradients
from lockstep.engine.param import LocalShard, joined
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.unit import Unit
from lockstep.engine.unsharded import fill_with_nan

T = TypeVar("T")

SIGNATURE = "lockstep_shard"
"""The key, among the version numbers of modules in a local state dict, of the signature of its shard."""

SAME_SHARD = (
    "A local state dict loads on the same rank, world size and wrapping only; save a sharded or a full one "
    "to change these."
)


def signature(shard: LocalShard) -> str:
    """Return a description of `shard` that no other rank, world size or wrapping has."""
    index = shard.config.mesh.index
    shapes = ", ".join(f"{e.name}{list(e.shape)}" for e in shard.params)
    return f"shard {index} of {shard.layout.num_shards} of {shapes}"


@contextmanager
def replaced_parameters(shard: LocalShard, values: Sequence[Tensor] | None) -> Iterator[None]:
    """Make modules see `values`, one per parameter, in place of the shard; nothing for None."""
    shard.hide()
    try:
        for param, value in zip(shard.params, values or (), strict=values is not None):
            param.put(nn.Parameter(value, requires_grad=shard.is_trainable(param)))
        yield
    finally:
        shard.show()


def padded_with_own_shard(group: ParamGroup) -> Tensor:
    """Return an unsharded flat tensor (padded numel) with this rank's shard in its place and NaN elsewhere.

    Loading into it needs no communication: a rank keeps its own shard alone, or there what it had before.
    """
    group.reshard()
    shard = group.shard
    shard.reclaim()
    flat = shard.flat.data
    if shard.whole:
        return flat.clone()
    full = flat.new_empty(shard.layout.padded_numel)
    fill_with_nan(full)
    start = shard.config.mesh.index * flat.numel()
    full[start : start + flat.numel()] = flat
    return full


def as_dtensors(full: Iterable[Tensor], shard: LocalShard) -> list[DTensor]:
    """Return `DTensor`s of tensors that all ranks of the group hold in full, in new memory.

    They are sharded along dim 0 as torch.chunk does: uneven, perhaps empty on the last ranks. 0-dim tensors
    and those of NO_SHARD are replicated; so is each over the replicas of a mesh that the user gave.
    Communicates nothing.
    """
    mesh = _mesh_of_states(shard, shard.config.mesh.process_group)
    found = []
    for tensor in full:
        placement: Placement = Shard(0)
        if shard.config.strategy is ShardingStrategy.NO_SHARD or tensor.dim() == 0:
            placement, local = Replicate(), tensor
        else:
            chunks, index = tensor.chunk(mesh.size(-1)), mesh.get_local_rank(mesh.ndim - 1)
            local = chunks[index] if index < len(chunks) else tensor[:0]
        placements = _on_last_axis(mesh, placement)
        found.append(
            DTensor.from_local(
                local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        )
    return found


def live_shard(shard: LocalShard) -> Tensor:
    """Return this rank's flat shard, in the same memory; a `DTensor` over the ranks that hold other shards.

    torch.distributed.checkpoint takes a plain tensor for one that all ranks have, and keeps that of one rank.
    Communicates nothing.
    """
    flat, axis = shard.flat.detach(), shard.config.mesh.shard
    if axis is None:
        return flat
    mesh = _mesh_of_states(shard, axis.group)
    return DTensor.from_local(flat, mesh, _on_last_axis(mesh, Shard(0)), run_check=False)


def _mesh_of_states(shard: LocalShard, group: dist.ProcessGroup) -> DeviceMesh:
    """Return the mesh of sharded states: the user's, with the shard axis last, else that of `group`."""
    given = shard.config.mesh.given
    if given is not None and given.device_type == shard.device.type:
        return given
    return DeviceMesh.from_group(group, shard.device.type)


def _on_last_axis(mesh: DeviceMesh, placement: Placement) -> list[Placement]:
    return [*[Replicate()] * (mesh.ndim - 1), placement]


def full_tensor(value: Tensor, name: str) -> Tensor:
    """Return a `DTensor` in full, and any other tensor as it is. A collective of the tensor's own mesh.

    Raises ValueError on a rank that is not in that mesh.
    """
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{name!r} is a DTensor over {value.device_mesh}, and this rank is not among its ranks; save it "
            "with torch.distributed.checkpoint, and load it into the state_dict of the model here."
        )
    return collectives.full_tensor(value)


@dataclass(frozen=True)
class Summon:
    """Options of `summon_full_params`."""

    writeback: bool = True  # write changes to the shards
    rank0_only: bool = False  # show unsharded parameters on rank 0 alone
    offload_to_cpu: bool = False  # keep the unsharded parameters on CPU
    with_grads: bool = False  # gather the gradients into `.grad`, too, and write changes of them back

    def __post_init__(self) -> None:
        if self.writeback and self.rank0_only:
            raise ValueError(
                "summon_full_params: writeback with rank0_only would change rank 0's shard alone; "
                "pass writeback=False."
            )


@contextmanager
def summoned(units: Iterable[Unit], options: Summon) -> Iterator[None]:
    """Make modules of `units` see unsharded original parameters in the context. A collective of all ranks."""
    groups = [unit.group for unit in units if unit.group]
    with ExitStack() as stack:
        presence = _presence(groups) if options.with_grads else {}
        for group in groups:
            full = group.gather_original()
            gradients = None
            if options.with_grads:
                gradients = _visible(group).full(group.dtypes.gradient, presence[group])
            if options.rank0_only and not group.config.mesh.is_first:
                continue
            if options.offload_to_cpu:
                full = full.cpu()
                gradients = [g if g is None else g.cpu() for g in gradients] if gradients else None
            group.summon(full, gradients)
            stack.callback(group.end_summon, options.writeback)
            if options.with_grads and options.writeback:
                stack.callback(_write_gradients_back, group)
        yield


def full_parameters(units: Mapping[str, Unit]) -> dict[str, Tensor]:
    """Return full original parameters of `units`, which are by their names. A collective of all ranks.

    For models that are small: units are gathered together. A unit with one shard returns its own memory.
    """
    refuse_when_busy(units.values(), "full_parameters")
    groups = _groups(units)
    with torch.no_grad():
        gathered = _gathered([(group.shard, group.local_original()) for group in groups.values()])
    return _by_name(groups, [g.shard.layout.views(f) for g, f in zip(groups.values(), gathered, strict=True)])


def full_gradients(units: Mapping[str, Unit]) -> dict[str, Tensor | None]:
    """Return full gradients of `units` as `full_parameters` does; None where no rank shows one."""
    refuse_when_busy(units.values(), "full_gradients")
    groups = _groups(units)
    presence = _presence(groups.values())
    local = [_visible(group).local(group.dtypes.gradient) for group in groups.values()]
    gathered = _gathered([(group.shard, flat) for group, flat in zip(groups.values(), local, strict=True)])
    pairs = zip(groups.values(), gathered, strict=True)
    return _by_name(groups, [_visible(group).views(full, presence[group]) for group, full in pairs])


def _groups(units: Mapping[str, Unit]) -> dict[str, ParamGroup]:
    groups = {name: unit.group for name, unit in units.items() if unit.group}
    for group in groups.values():
        group.reshard()
    return groups


def _by_name(groups: Mapping[str, ParamGroup], values: Iterable[Sequence[T]]) -> dict[str, T]:
    """Return `values`, one for each parameter of each group, by the names of parameters in the model."""
    return {
        joined(name, param.name): value
        for (name, group), of_group in zip(groups.items(), values, strict=True)
        for param, value in zip(group.shard.params, of_group, strict=True)
    }


def _gathered(shards: Sequence[tuple[LocalShard, Tensor]]) -> list[Tensor]:
    """Return of each pair all shards end to end; what is full already as it is.

    One gather for all that go to the same ranks in the same dtype.
    """
    found = [flat.to(shard.device) for shard, flat in shards]
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for place, ((shard, _), flat) in enumerate(zip(shards, found, strict=True)):
        if (axis := shard.config.mesh.shard) and flat.numel() == shard.layout.shard_numel:
            alike[axis.group, flat.dtype, flat.device].append(place)
    for places in alike.values():
        axis, sent = shards[places[0]][0].config.mesh.shard, torch.cat([found[place] for place in places])
        assert axis
        full = collectives.start_gather(sent.new_empty(axis.size * len(sent)), sent, axis)()
        numels = [found[place].numel() for place in places]
        pieces = torch.split(full.view(axis.size, -1), numels, dim=1)
        for place, piece in zip(places, pieces, strict=True):
            found[place] = piece.reshape(-1)
    return found


def _write_gradients_back(group: ParamGroup) -> None:
    shown = (param.refs[0].read() for param in group.shard.params)
    _visible(group).write_back([getattr(value, "grad", None) for value in shown])


def _presence(groups: Iterable[ParamGroup]) -> dict[ParamGroup, list[float]]:
    """Return for each parameter of each group how many ranks show a gradient: one exchange for each mesh."""
    alike: defaultdict[object, list[ParamGroup]] = defaultdict(list)
    for group in groups:
        alike[group.config.mesh.groups, group.shard.device].append(group)
    found: dict[ParamGroup, list[float]] = {}
    for members in alike.values():
        mine = {group: _visible(group).presence() for group in members}
        flags = torch.tensor(list(chain(*mine.values())), device=members[0].shard.device)
        everyones = iter(collectives.total(flags, members[0].config.mesh.groups).tolist())
        found |= {group: list(islice(everyones, len(own))) for group, own in mine.items()}
    return found


def _visible(group: ParamGroup) -> VisibleGradients:
    assert isinstance(group.gradients, VisibleGradients)
    return group.gradients


def refuse_when_busy(units: Iterable[Unit], what: str) -> None:
    """Raise RuntimeError inside forward and backward, and inside `summon_full_params`."""
    for unit in units:
        if unit.root_state.busy:
            raise RuntimeError(f"{what} is illegal inside forward and backward; call it between steps.")
        if unit.group and unit.group.state is GroupState.SUMMONED:
            raise RuntimeError(f"{what} is illegal inside summon_full_params; leave that context first.")
