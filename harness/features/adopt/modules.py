"""The variables of a package's modules, put back after each test. Runs inside a rank.

Libraries keep in them what belongs to a process that trains: the groups they have made, the backend they have
initialised. A process of its own takes that with it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_COLLECTIONS = (list, dict, set)


@contextlib.contextmanager
def restored(package: str) -> Iterator[None]:
    """Put the variables of a package's modules back at the end: what they refer to, what collections hold.

    Modules that are imported in between stay as they are.
    """
    modules = [module for name, module in sys.modules.items() if _is_of(name, package)] if package else []
    before = [(module, _read(module)) for module in modules]
    try:
        yield
    finally:
        for module, variables in before:
            _restore(module, variables)


def _is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _read(module: ModuleType) -> dict[str, tuple[Any, Any]]:
    """Return each variable with a copy of what it holds, where it is a plain collection."""
    return {
        name: (value, value.copy() if type(value) in _COLLECTIONS else None)
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


def _restore(module: ModuleType, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in before and not name.startswith("__")]:
        if not isinstance(now[name], ModuleType):  # a submodule that was imported in between
            del now[name]
    for name, (value, held) in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
        match value, held:
            case list(), list() if not _is_same(value, held):
                value[:] = held
            case (dict(), dict()) | (set(), set()) if not _is_same(value, held):
                value.clear()
                value.update(held)


def _is_same(value: Any, held: Any) -> bool:
    """Return whether a collection holds the same objects; `==` might ask tensors for a truth value."""
    if len(value) != len(held):
        return False
    if isinstance(value, dict):
        return all(name in value and value[name] is each for name, each in held.items())
    if isinstance(value, set):
        return bool(value == held)
    return all(one is other for one, other in zip(value, held, strict=True))
