"""Checks of what a user passes to the wrapper front, before anything is changed. Imports torch only."""

import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch import nn

from harness.engine.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from harness.engine.wrapping import has_forward

_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "sharding_strategy": ShardingStrategy,
        "cpu_offload": CPUOffload,
        "mixed_precision": MixedPrecision,
        "backward_prefetch": BackwardPrefetch,
    }
)


def check_types(param_init_fn: object, **given: object) -> None:
    """Raise TypeError for an argument of another type; torch's own types are others, too."""
    for name, value in given.items():
        expected = _TYPES[name]
        if value is not None and not isinstance(value, expected):
            found = type(value)
            raise TypeError(
                f"{name}: expected None or a {expected.__name__} of harness.engine, got {value!r}, "
                f"a {found.__qualname__} of {found.__module__}."
            )
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn: expected a function that takes a module, got {param_init_fn!r}")


def check_module(module: object, wrapper: type[nn.Module]) -> None:
    """Raise TypeError or ValueError for what can be no unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if isinstance(module, wrapper):
        raise ValueError(
            f"FullyShardedDataParallel({type(module.module).__name__}) is a unit already; "
            "use it as it is, or wrap a module that contains it."
        )
    if not has_forward(module):
        raise ValueError(
            f"FullyShardedDataParallel cannot wrap {type(module).__name__}: it has no forward of its own; "
            "wrap what it contains, or the module that contains it."
        )


def warn_if_all_ignored(module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Warn when the module to wrap is itself ignored, so that the unit has no parameters."""
    if module in ignored:
        warnings.warn(
            f"FullyShardedDataParallel({type(module).__name__}): the module is itself in ignored_modules, so "
            "nothing of it is sharded; ignore modules below it, or do not wrap it.",
            UserWarning,
            stacklevel=3,
        )
