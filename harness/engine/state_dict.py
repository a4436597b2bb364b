"""State of one unit, saved and loaded in each `StateDictType`; and summoned parameters. Runs on ranks.

Modules save and load themselves, as in an unsharded model; meanwhile they see other tensors in place of their
parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.engine import collectives
from harness.engine.api import GroupState, ShardingStrategy, StateDictSettings, StateDictType
from harness.engine.gradients import VisibleGradients
from harness.engine.param import FLAT, INNER, LocalShard, ParamRef, clean_name, joined
from harness.engine.param_group import ParamGroup
from harness.engine.torch_internals import module_versions, new_state_dict
from harness.engine.unit import Unit
from harness.engine.unsharded import fill_with_nan

_SIGNATURE = "lockstep_shard"
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


@dataclass(frozen=True)
class UnitState:
    """Saves and loads the state of `unit`, which `wrapper` stands for in the model.

    Units below take part through their own wrappers.
    """

    unit: Unit
    wrapper: nn.Module
    settings: StateDictSettings

    @property
    def module(self) -> nn.Module:
        inner = self.wrapper._modules[INNER]
        assert inner is not None
        return inner

    @property
    def is_local(self) -> bool:
        return self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT

    @torch.no_grad()
    def save(self, destination: dict[str, Any] | None, prefix: str, keep_vars: bool) -> dict[str, Any]:
        """Return this unit's state and that of the units below it, added to `destination` if given.

        A collective of all ranks.

        Raises:
            RuntimeError: Inside forward and backward, and for sharded and local state inside
                `summon_full_params`.
        """
        self._refuse_when_busy()
        result = new_state_dict() if destination is None else destination
        found = result if self._is_destination() else new_state_dict()
        with self._parameters_to_save():
            self.module.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        if self.is_local and self.unit.group:
            shard = self.unit.group.shard
            found[prefix + FLAT] = shard.flat if keep_vars else shard.flat.detach()
            module_versions(found).setdefault(prefix[:-1], {})[_SIGNATURE] = signature(shard)
        for name, dtype in self._buffer_dtypes():
            if prefix + name in found:
                found[prefix + name] = found[prefix + name].to(dtype)
        if self.settings.state_dict_config.offload_to_cpu:
            for name, value in found.items():
                if name.startswith(prefix) and isinstance(value, Tensor):
                    found[name] = value.cpu()
        return result

    def before_load(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], errors: list[str]
    ) -> None:
        """Give `state` the names of the wrapped module, and its parameters memory to load into."""
        refuse_when_busy([self.unit], "load_state_dict")
        self._refuse_rank0_only(state, prefix)
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}{INNER}.{name[len(prefix) :]}"] = state.pop(name)
        group = self.unit.group
        if not self.is_local:
            self._unshard_dtensors(state, f"{prefix}{INNER}.")
            if group:
                group.summon(_padded_with_own_shard(group), None)
        elif group:
            # The wrapper loads the flat shard itself, under the name that it has in the state.
            value = state.pop(f"{prefix}{INNER}.{FLAT}", None)
            shard = group.shard
            saved, here = metadata.get(_SIGNATURE, signature(shard)), signature(shard)
            if value is None or value.shape != shard.flat.shape or saved != here:
                given = "nothing" if value is None else f"{saved}, {value.numel()} elements"
                errors.append(
                    f"{prefix}{FLAT}: this rank holds {here}, {shard.flat.numel()} elements, and was given "
                    f"{given}. {SAME_SHARD}"
                )
                value = shard.flat.detach()  # stays as it is
            state[prefix + FLAT] = value
            group.reshard()
            shard.reclaim()
            shard.hide()
            ParamRef(self.wrapper, FLAT).put(shard.flat)

    def after_load(self) -> None:
        """Write the loaded parameters to the shard, and make modules see it again."""
        group = self.unit.group
        if not group:
            return
        if not self.is_local:
            group.end_summon(writeback=True)
            return
        ref = ParamRef(self.wrapper, FLAT)
        loaded = ref.read()
        if isinstance(loaded, Tensor) and loaded is not group.shard.flat:  # replaced by assign=True
            group.shard.flat.data.copy_(loaded.detach())
        ref.clear()
        group.shard.show()

    def abandon_load(self) -> None:
        """Make modules see their shards again after an exception."""
        if group := self.unit.group:
            if group.state is GroupState.SUMMONED:
                group.end_summon(writeback=False)
            elif self.is_local:
                ParamRef(self.wrapper, FLAT).clear()
                group.shard.show()

    def _refuse_when_busy(self) -> None:
        summoned = self.unit.group and self.unit.group.state is GroupState.SUMMONED
        # Summoned parameters are what full state consists of.
        is_full = self.settings.state_dict_type is StateDictType.FULL_STATE_DICT
        if self.unit.root_state.busy or (summoned and not is_full):
            refuse_when_busy([self.unit], "state_dict")

    def _is_destination(self) -> bool:
        """Return whether this rank keeps the state."""
        if not self.settings.rank0_only:
            return True
        # A unit without parameters of its own has no axes; it follows the units around it.
        groups = [unit.group for unit in (self.unit, *self.unit.root_state.units) if unit.group]
        return groups[0].config.mesh.is_first if groups else dist.get_rank() == 0

    def _parameters_to_save(self) -> AbstractContextManager[None]:
        """Return a context in which modules see what they are to save in place of their parameters."""
        group = self.unit.group
        if not group or group.state is GroupState.SUMMONED:
            return nullcontext()
        if self.is_local:
            group.shard.reclaim()
            return _replaced_parameters(group.shard, None)
        views = group.shard.layout.views(group.gather_original())
        if not self._is_destination():
            return _replaced_parameters(group.shard, None)
        if self.settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            return _replaced_parameters(group.shard, as_dtensors(views, group.shard))
        if self.settings.state_dict_config.offload_to_cpu:
            # Here, not at the end of `save`: device memory then holds one unsharded group at a time.
            views = [view.cpu() for view in views]
        return _replaced_parameters(group.shard, views)

    def _buffer_dtypes(self) -> Iterator[tuple[str, torch.dtype]]:
        """Yield each name of each cast buffer with the dtype to save it in; shared modules have several."""
        for path, module in self.module.named_modules(remove_duplicate=False):
            for name in module._buffers:
                if dtype := self.unit.buffers.dtypes.get(ParamRef(module, name)):
                    yield joined(clean_name(path), name), dtype

    def _refuse_rank0_only(self, state: dict[str, Any], prefix: str) -> None:
        """Raise RuntimeError on all ranks if some of them, but not all, have nothing to load."""
        group = self.unit.group
        if not self.settings.rank0_only or not group:
            return
        lacking = not any(name.startswith(prefix) for name in state)
        mesh = group.config.mesh
        count = collectives.total(torch.tensor(float(lacking), device=group.shard.device), mesh.groups)
        if 0 < count < mesh.size:
            raise RuntimeError(
                "load_state_dict: with rank0_only some ranks were given nothing to load. Loading needs the "
                "full state dict on every rank; torch.load(..., mmap=True) reads it without a copy. Or load "
                "on rank 0 before wrapping, and wrap with sync_module_states=True."
            )

    def _unshard_dtensors(self, state: dict[str, Any], prefix: str) -> None:
        """Replace `DTensor`s by full tensors, except for those that units below will load."""
        modules = self.module.named_modules(remove_duplicate=False)
        below = tuple(f"{name}." for name, module in modules if INNER in module._modules)
        for name, value in state.items():
            own = name.startswith(prefix) and not name.removeprefix(prefix).startswith(below)
            if own and isinstance(value, DTensor):
                state[name] = full_tensor(value, name.replace(f"{INNER}.", ""))


@contextmanager
def _replaced_parameters(shard: LocalShard, values: Sequence[Tensor] | None) -> Iterator[None]:
    """Make modules see `values`, one per parameter, in place of the shard; nothing for None."""
    shard.hide()
    try:
        for param, value in zip(shard.params, values or (), strict=values is not None):
            param.put(nn.Parameter(value, requires_grad=shard.is_trainable(param)))
        yield
    finally:
        shard.show()


def _padded_with_own_shard(group: ParamGroup) -> Tensor:
    """Return an unsharded flat tensor (padded numel) with this rank's shard in its place and NaN elsewhere.

    This is enough to load into without communication: a rank keeps its own shard alone, and where nothing is
    loaded that has its old values.
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
    and those of NO_SHARD are replicated. Communicates nothing.
    """
    mesh = DeviceMesh.from_group(shard.config.mesh.process_group, shard.device.type)
    no_shard = shard.config.strategy is ShardingStrategy.NO_SHARD
    return [_as_dtensor(tensor, mesh, replicated=no_shard or tensor.dim() == 0) for tensor in full]


def _as_dtensor(full: Tensor, mesh: DeviceMesh, replicated: bool) -> DTensor:
    chunks = (full,) if replicated else full.chunk(mesh.size())
    index = 0 if replicated else mesh.get_local_rank()
    local = chunks[index] if index < len(chunks) else full[:0]
    placement = Replicate() if replicated else Shard(0)
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )


def full_tensor(value: Tensor, name: str) -> Tensor:
    """Return a `DTensor` in full, and any other tensor as it is. A collective of the tensor's own mesh.

    Raises:
        ValueError: On a rank that is not in that mesh.
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
    """Options of `summon_full_params`.

    Attributes:
        writeback: Write changes to the shards.
        rank0_only: Show unsharded parameters on rank 0 alone.
        offload_to_cpu: Keep the unsharded parameters on CPU.
        with_grads: Gather the gradients into `.grad`, too.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def __post_init__(self) -> None:
        if self.writeback and self.rank0_only:
            raise ValueError(
                "summon_full_params: writeback with rank0_only would change rank 0's shard alone; "
                "pass writeback=False."
            )


@contextmanager
def summoned(units: Iterable[Unit], options: Summon) -> Iterator[None]:
    """Make modules of `units` see unsharded original parameters in the context. A collective of all ranks."""
    with ExitStack() as stack:
        for group in [unit.group for unit in units if unit.group]:
            _summon(group, options, stack)
        yield


def _summon(group: ParamGroup, options: Summon, stack: ExitStack) -> None:
    full = group.gather_original()
    gradients = None
    if options.with_grads:
        assert isinstance(group.gradients, VisibleGradients)
        gradients = group.gradients.full(group.dtypes.gradient)
    if options.rank0_only and not group.config.mesh.is_first:
        return
    if options.offload_to_cpu:
        full = full.cpu()
        gradients = [g if g is None else g.cpu() for g in gradients] if gradients else None
    group.summon(full, gradients)
    stack.callback(group.end_summon, options.writeback)


def refuse_when_busy(units: Iterable[Unit], what: str) -> None:
    """Raise RuntimeError inside forward and backward, and inside `summon_full_params`."""
    for unit in units:
        if unit.root_state.busy:
            raise RuntimeError(f"{what} is illegal inside forward and backward; call it between steps.")
        if unit.group and unit.group.state is GroupState.SUMMONED:
            raise RuntimeError(f"{what} is illegal inside summon_full_params; leave that context first.")
