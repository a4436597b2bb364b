"""Units marked where a model is built: `wrap` inside `enable_wrap`. Imports torch only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Wrapping:
    wrapper_cls: Callable[..., nn.Module]
    arguments: Mapping[str, Any]


# Its own in every thread, and what it was before when a context ends, however that ends.
_CURRENT: ContextVar[_Wrapping | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let `wrap` inside the context make ``wrapper_cls(module, **wrapper_kwargs)``; in this thread only.

    Of nested contexts the innermost counts.
    """
    if not callable(wrapper_cls):
        raise TypeError(f"enable_wrap: wrapper_cls must be a class that takes a module, got {wrapper_cls!r}")
    token = _CURRENT.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped as the `enable_wrap` around says, but for ``wrap_overrides``.

    Outside any such context return ``module`` itself.
    """
    current = _CURRENT.get()
    if current is None:
        return module
    return current.wrapper_cls(module, **{**current.arguments, **wrap_overrides})
