"""Saving and loading state of the wrapper and its optimizer, with PyTorch's public names. Runs on ranks."""

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
)
from harness.engine.optim_params import OptimizerView, view_of
from harness.engine.param import INNER, clean_name, joined
from harness.engine.state_dict import UnitState, refuse_when_busy
from harness.engine.torch_internals import module_versions, new_state_dict
from harness.engine.unit import Unit


class WrapperState(nn.Module):
    """Base class of the wrapper: its methods that save and load state."""

    _unit: Unit
    _state_settings = StateDictSettings.of(StateDictType.FULL_STATE_DICT)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return parameters and buffers in their original dtypes. A collective of all ranks.

        By default every rank gets everything, unsharded and named as in the unsharded model. See
        `StateDictType` for the other types, and for what they cost.
        """
        return self._state.save(destination, prefix, keep_vars)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returned, of the type that is set, or full tensors. Every rank calls it.

        Full and sharded state loads from any wrapping and world size.

        Returns:
            The missing and unexpected names.

        Raises:
            RuntimeError: For missing and unexpected names if `strict`, and for local state of another shard.
        """
        refuse_when_busy((wrapper._unit for _, wrapper in _wrappers(self)), "load_state_dict")
        try:
            found = super().load_state_dict(self._with_versions(state_dict), strict, assign)
        except BaseException as error:
            for _, wrapper in _wrappers(self):
                wrapper._state.abandon_load()
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
        """Set the type of state dict for all units of `module`; return what the outermost one had.

        Raises:
            TypeError: For a config of another type.
            ValueError: If there is no unit.
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

        Raises:
            ValueError: If `optim` has other parameters than `model`.
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

        Raises:
            ValueError: If the state does not fit `optim`.
        """
        loaded = optim_state.load(_view(model, optim, group), optim_state_dict, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    @property
    def _state(self) -> UnitState:
        return UnitState(self._unit, self, self._state_settings)

    def _with_versions(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `state_dict` with its version numbers under the names that modules have here."""
        versions = module_versions(state_dict)
        return new_state_dict(
            state_dict, {name: versions.get(clean_name(name), {}) for name in _registered_names(self)}
        )

    def _register_state_hooks(self) -> None:
        # By hooks, as a plain module around this one loads it without calling its `load_state_dict`.
        self.register_load_state_dict_pre_hook(type(self)._before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(type(self)._after_load)  # type: ignore[no-untyped-call]

    def _before_load(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: Any
    ) -> None:
        self._state.before_load(state_dict, prefix, metadata, errors=lists[-1])

    def _after_load(self, _: object) -> None:
        self._state.after_load()


def _wrappers(model: nn.Module) -> list[tuple[str, WrapperState]]:
    """Return all wrappers in `model` with clean names, outer before inner."""
    return [(clean_name(name), m) for name, m in model.named_modules() if isinstance(m, WrapperState)]


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
