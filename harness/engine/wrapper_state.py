"""The part of the wrapper front that saves and loads state, with PyTorch's public names. Runs on ranks."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import optim_state
from harness.engine.api import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_for,
)
from harness.engine.optim_params import OptimizerView, find_places, world_of
from harness.engine.param import INNER, clean_name, registered_names
from harness.engine.state_dict import UnitState, refuse_when_busy
from harness.engine.unit import Unit


class StateFront(nn.Module):
    """What a wrapper that holds a ``_unit`` knows of state dicts."""

    _unit: Unit
    _state_settings = settings_for(StateDictType.FULL_STATE_DICT)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return parameters and buffers in their original dtypes, in the kind that `state_dict_type` says.

        A collective: every rank calls it. By default every rank gets everything, in full, named as in the
        unsharded model; `StateDictType` says what each kind holds and costs.
        """
        return self._state.save(destination, prefix, keep_vars)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load, on every rank, what `state_dict` returned: of the kind that is set, or full tensors.

        Full and sharded state comes from any wrapping and world size. Returns the missing and unexpected
        names; raises RuntimeError for them if ``strict``, and for local state of another shard.
        """
        refuse_when_busy((front._unit for _, front in _fronts(self)), "load_state_dict")
        try:
            found = super().load_state_dict(self._with_versions(state_dict), strict, assign)
        except BaseException as error:
            for _, front in _fronts(self):
                front._state.abandon_load()
            if isinstance(error, RuntimeError):
                raise RuntimeError(str(error).replace(f"{INNER}.", "")) from None
            raise
        missing, unexpected = ([clean_name(name) for name in names] for names in found)
        return found._replace(missing_keys=missing, unexpected_keys=unexpected)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of state dict for all units of ``module``; return what the outermost one had.

        Raises TypeError for a config of another kind, ValueError if there is no unit.
        """
        previous = StateFront.get_state_dict_type(module)
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        for _, front in _fronts(module):
            front._state_settings = settings
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return what is set for the outermost unit of ``module``; raise ValueError if there is none."""
        found = _fronts(module)
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
        """Set the kind of state dict for all units of ``module`` inside the context."""
        before = [(front, front._state_settings) for _, front in _fronts(module)]
        StateFront.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for front, settings in before:
                front._state_settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state of ``optim``, or the given state dict of it, under original parameter names.

        A collective of all ranks; the kind is what `state_dict_type` says, and costs what it does for the
        model, times the tensors per parameter. Load it through `optim_state_dict_to_load`, not into ``optim``
        itself. ``group``: whose rank 0 gets it with rank0_only; None is the outermost unit's.
        Raises ValueError if ``optim`` has other parameters than ``model``.
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
        """Return what `optim_state_dict` of any wrapping and world size returned as ``optim`` loads it.

        A collective of all ranks. With rank0_only the state of rank 0 of ``group`` is read. The result is in
        memory of its own. ``is_named_optimizer``: ``optim`` wants names of parameters, not numbers;
        ``load_directly``: load it, too. Raises ValueError if it does not fit ``optim``.
        """
        loaded = optim_state.load(_view(model, optim, group), optim_state_dict, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    @property
    def _state(self) -> UnitState:
        return UnitState(self._unit, self, self._state_settings)

    def _with_versions(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of ``state_dict`` whose version numbers are found under the names of modules here."""
        versions = getattr(state_dict, "_metadata", None)
        copied = OrderedDict(state_dict)
        if versions is not None:
            names = registered_names(self)
            copied._metadata = {name: versions.get(clean_name(name), {}) for name in names}  # type: ignore[attr-defined]
        return copied

    def _register_state_hooks(self) -> None:
        # A module around this one that is no wrapper loads without calling `load_state_dict` here.
        self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def _fronts(model: nn.Module) -> list[tuple[str, StateFront]]:
    """Return all wrappers in ``model`` with clean names, outer before inner."""
    return [(clean_name(name), m) for name, m in model.named_modules() if isinstance(m, StateFront)]


def _view(model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> OptimizerView:
    settings = StateFront.get_state_dict_type(model)
    units = [(name, front._unit) for name, front in _fronts(model)]
    return OptimizerView(find_places(model, units), optim, settings, (group,) if group else world_of(units))


def _before_load(
    front: StateFront, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: Any
) -> None:
    front._state.before_load(state_dict, prefix, metadata, errors=lists[-1])


def _after_load(front: StateFront, _: Any) -> None:
    front._state.after_load()
