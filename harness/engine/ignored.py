"""What the user tells a unit to leave alone. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Ignored:
    """Modules, with all that lies below them, and parameters, with all of those modules' own."""

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()

    @property
    def states(self) -> frozenset[nn.Module | nn.Parameter]:
        return self.modules | self.parameters

    def union(self, others: Iterable[Ignored]) -> Ignored:
        others = list(others)
        return Ignored(
            self.modules.union(*(other.modules for other in others)),
            self.parameters.union(*(other.parameters for other in others)),
        )


def resolve(modules: object, states: object, is_unit: Callable[[nn.Module], bool]) -> Ignored:
    """Return what the arguments ``ignored_modules`` and ``ignored_states`` mean; None is nothing.

    Raises ValueError when both are given or a unit (``is_unit``) is among them, TypeError for anything that
    is not an iterable of modules (or, in ``states``, of parameters).
    """
    if modules is not None and states is not None:
        raise ValueError(
            "ignored_modules and ignored_states are both given; put all modules and parameters into "
            "ignored_states. (Units made by auto_wrap_policy have the outer unit's ignored_states already.)"
        )
    given = _listed("ignored_modules: expected a list of modules", modules, nn.Module)
    either = "ignored_states: expected a list of modules or parameters"
    given += _listed(either, states, nn.Module | nn.Parameter)
    below = frozenset(m for one in given if isinstance(one, nn.Module) for m in one.modules())
    for module in filter(is_unit, below):
        raise ValueError(
            f"ignored_modules, ignored_states: they contain {type(module).__name__}"
            f"({type(next(module.children(), None)).__name__}), which shards its parameters already; "
            "ignore what is not wrapped, or do not wrap it."
        )
    parameters = {p for p in given if isinstance(p, nn.Parameter)}
    return Ignored(below, frozenset(parameters.union(p for m in below for p in m.parameters(recurse=False))))


def parameters(front: str, given: object) -> frozenset[nn.Parameter]:
    """Return what ``ignored_params`` of ``front`` names; TypeError for what is no parameter."""
    return frozenset(_listed(f"{front}: ignored_params: expected a set of parameters", given, nn.Parameter))


def _listed(expected: str, given: object, kind: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable) or isinstance(given, nn.Parameter | str):
        raise TypeError(f"{expected}, got one {type(given).__name__}; put it into a list.")
    listed = list(given)
    for index, one in enumerate(listed):
        if not isinstance(one, kind):
            raise TypeError(f"{expected}, but number {index} is a {type(one).__name__}.")
    return listed
