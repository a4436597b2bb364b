"""Saving and loading state of the wrapper and its optimizer, with PyTorch's public names. Runs on ranks."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.engine import collectives, optim_state
from lockstep.engine.api import (
    GroupState,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from lockstep.engine.optim_state import OptimizerView, view_of
from lockstep.engine.param import FLAT, INNER, ParamRef, joined
from lockstep.engine.state_dict import (
    SAME_SHARD,
    SIGNATURE,
    as_dtensors,
    full_tensor,
    live_shard,
    padded_with_own_shard,
    refuse_when_busy,
    replaced_parameters,
    signature,
)
from lockstep.engine.torch_internals import module_versions, new_state_dict, untraced
from lockstep.engine.unit import Unit


class WrapperState(nn.Module):
    """Base class of the wrapper: its methods that save and load state."""

    _unit: Unit
    _state_settings = StateDictSettings.of(StateDictType.FULL_STATE_DICT)

    @property
    def _is_local(self) -> bool:
        return self._state_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT

    @property
    @untraced
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    @torch.no_grad()
    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return parameters and buffers in their original dtypes. A collective of all ranks.

        By default every rank gets everything, unsharded and named as in the unsharded model. See
        `StateDictType` for the other types, and for what they cost.

        Raises RuntimeError inside forward and backward, and in `summon_full_params` but for full state.
        """
        # Summoned parameters are what full state consists of.
        is_full = self._state_settings.state_dict_type is StateDictType.FULL_STATE_DICT
        if self._unit.root_state.busy or not is_full:
            refuse_when_busy([self._unit], "state_dict")
        result = new_state_dict() if destination is None else destination
        found = result if self._is_destination() else new_state_dict()
        with self._parameters_to_save():
            self.module.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        if self._is_local and self._unit.group:
            shard = self._unit.group.shard
            live = live_shard(shard)
            found[prefix + FLAT] = nn.Parameter(live, shard.flat.requires_grad) if keep_vars else live
            module_versions(found).setdefault(prefix[:-1], {})[SIGNATURE] = signature(shard)
        for path, module in self.module.named_modules(remove_duplicate=False):
            for name in module._buffers:
                if dtype := self._unit.buffers.dtypes.get(ParamRef(module, name)):
                    key = prefix + joined(path, name)
                    if key in found:
                        found[key] = found[key].to(dtype)
        if self._state_settings.state_dict_config.offload_to_cpu:
            for name, value in found.items():
                if name.startswith(prefix) and isinstance(value, Tensor):
                    found[name] = value.cpu()
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full tensors, or what `state_dict` returned for the type that is set. Every rank calls it.

        Full and sharded state loads from any wrapping and world size. Returns missing and unexpected names.

        Raises RuntimeError for missing and unexpected names if `strict`, and local state of another shard.
        """
        wrappers = [wrapper for _, wrapper in _wrappers(self)]
        refuse_when_busy((wrapper._unit for wrapper in wrappers), "load_state_dict")
        versions = module_versions(state_dict)
        versions_here = {name: versions.get(_clean_name(name), {}) for name in _registered_names(self)}
        try:
            found = super().load_state_dict(new_state_dict(state_dict, versions_here), strict, assign)
        except BaseException as error:
            for wrapper in wrappers:
                wrapper._abandon_load()
            if isinstance(error, RuntimeError):
                raise RuntimeError(str(error).replace(f"{INNER}.", "")) from None
            raise
        missing, unexpected = ([_clean_name(name) for name in names] for names in found)
        return found._replace(missing_keys=missing, unexpected_keys=unexpected)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of state dict for all units of `module`; return what the outermost one had.

        Raises TypeError for a config of another type, and ValueError if there is no unit.
        """
        previous = WrapperState.get_state_dict_type(module)
        settings = StateDictSettings.of(state_dict_type, state_dict_config, optim_state_dict_config)
        for _, wrapper in _wrappers(module):
            wrapper._state_settings = settings
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return what is set for the outermost unit of `module`; raise ValueError if there is none."""
        found = _wrappers(module)
        if not found:
            raise ValueError(f"{type(module).__name__} contains no FullyShardedDataParallel unit.")
        return found[0][1]._state_settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Set the type of state dict for all units of `module` inside the context."""
        before = [(wrapper, wrapper._state_settings) for _, wrapper in _wrappers(module)]
        WrapperState.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in before:
                wrapper._state_settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state of `optim` under original parameter names. A collective of all ranks.

        The type is the one that is set for `model`, and costs what it does for the model, times the number of
        tensors per parameter. Load the result through `optim_state_dict_to_load`, not into `optim` itself.

        Args:
            optim_state_dict: The state dict of `optim`. None: its current one.
            group: The group whose rank 0 gets the result with rank0_only. None: the outermost unit's.

        Raises ValueError if `optim` has other parameters than `model`.
        """
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return optim_state.save(_view(model, optim, group), given)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what `optim_state_dict` returned, in new memory and in the form that `optim` loads.

        A collective of all ranks. The state may come from any wrapping and world size.

        Args:
            optim_state_dict: The state; with rank0_only it is read on rank 0 alone.
            is_named_optimizer: Use names of parameters as keys instead of numbers.
            load_directly: Load the result into `optim`, too.
            group: The group of that rank 0. None: the outermost unit's.

        Raises ValueError if the state does not fit `optim`.
        """
        loaded = optim_state.load(_view(model, optim, group), optim_state_dict, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    def _register_state_hooks(self) -> None:
        # By hooks, as a plain module around this one loads it without calling its `load_state_dict`.
        self.register_load_state_dict_pre_hook(type(self)._before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(type(self)._after_load)  # type: ignore[no-untyped-call]

    def _before_load(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: Any) -> None:
        """Give `state` the names of the wrapped module, and its parameters memory to load into."""
        refuse_when_busy([self._unit], "load_state_dict")
        self._refuse_rank0_only(state, prefix)
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}{INNER}.{name[len(prefix) :]}"] = state.pop(name)
        group = self._unit.group
        if not self._is_local:
            self._unshard_dtensors(state, f"{prefix}{INNER}.")
            if group:
                group.summon(padded_with_own_shard(group), None)
        elif group:
            # The wrapper loads the flat shard itself, under the name that it has in the state.
            value = state.pop(f"{prefix}{INNER}.{FLAT}", None)
            value = value.to_local() if isinstance(value, DTensor) else value
            shard = group.shard
            saved, here = metadata.get(SIGNATURE, signature(shard)), signature(shard)
            if value is None or value.shape != shard.flat.shape or saved != here:
                given = "nothing" if value is None else f"{saved}, {value.numel()} elements"
                lists[-1].append(
                    f"{prefix}{FLAT}: this rank holds {here}, {shard.flat.numel()} elements, and was given "
                    f"{given}. {SAME_SHARD}"
                )
                value = shard.flat  # stays as it is
            state[prefix + FLAT] = value
            group.reshard()
            shard.reclaim()
            shard.hide()
            ParamRef(self, FLAT).put(shard.flat)

    def _after_load(self, _: object) -> None:
        """Write the loaded parameters to the shard, and make modules see it again."""
        group = self._unit.group
        if group and self._is_local:
            loaded = ParamRef(self, FLAT).read()
            if isinstance(loaded, Tensor) and loaded is not group.shard.flat:  # replaced by assign=True
                group.shard.flat.data.copy_(loaded.detach())
            ParamRef(self, FLAT).clear()
            group.shard.show()
        elif group:
            group.end_summon(writeback=True)

    def _abandon_load(self) -> None:
        """Make modules see their shards again after an exception."""
        if group := self._unit.group:
            if group.state is GroupState.SUMMONED:
                group.end_summon(writeback=False)
            else:
                ParamRef(self, FLAT).clear()  # put there to load a local state
                group.shard.show()

    def _is_destination(self) -> bool:
        """Return whether this rank keeps the state."""
        if not self._state_settings.rank0_only:
            return True
        # A unit without parameters of its own has no axes; it follows the units around it.
        groups = [unit.group for unit in (self._unit, *self._unit.root_state.units) if unit.group]
        return groups[0].config.mesh.is_first if groups else dist.get_rank() == 0

    def _parameters_to_save(self) -> AbstractContextManager[None]:
        """Return a context in which modules see what they are to save in place of their parameters."""
        group = self._unit.group
        if not group or group.state is GroupState.SUMMONED:
            return nullcontext()
        if self._is_local:
            group.shard.reclaim()
            return replaced_parameters(group.shard, None)
        views = group.shard.layout.views(group.gather_original())
        if not self._is_destination():
            return replaced_parameters(group.shard, None)
        if self._state_settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            return replaced_parameters(group.shard, as_dtensors(views, group.shard))
        if self._state_settings.state_dict_config.offload_to_cpu:
            # Here, not at the end of `state_dict`: device memory then holds one unsharded group at a time.
            views = [view.cpu() for view in views]
        return replaced_parameters(group.shard, views)

    def _refuse_rank0_only(self, state: dict[str, Any], prefix: str) -> None:
        """Raise RuntimeError on all ranks if some of them, but not all, have nothing to load."""
        group = self._unit.group
        if not self._state_settings.rank0_only or not group:
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


def _wrappers(model: nn.Module) -> list[tuple[str, WrapperState]]:
    """Return all wrappers in `model` by name, outer before inner."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, WrapperState)]


def _clean_name(name: str) -> str:
    """Return `name`, of a module or an entry of its state, as it is in the unsharded model."""
    return ".".join(part for part in name.split(".") if part != INNER)


def _registered_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names under which `load_state_dict` looks for modules: those that wrappers do not clean."""
    yield prefix
    for name, child in module._modules.items():
        if child is not None:
            yield from _registered_names(child, joined(prefix, name))


def _view(model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> OptimizerView:
    settings = WrapperState.get_state_dict_type(model)
    units = [(name, wrapper._unit) for name, wrapper in _wrappers(model)]
    return view_of(optim, model, units, settings, group)
