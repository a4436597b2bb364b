"""Processes that a test has started and a module holds: a pool in a global variable, for later tests too."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from lockstep.tracebacks import is_installed

_DEPTH = 4
"""Steps from a global variable to a process: the pool, its list of processes, the process; one to spare."""
MAX_LOOKS = 20_000
"""Number of objects that are looked at."""


def held_by_modules(processes: Iterable[BaseProcess]) -> set[int]:
    """Return the ids of those processes that global variables of the user's modules lead to."""
    wanted = {id(each) for each in processes}
    found: set[int] = set()
    seen: set[int] = set()
    level: list[Any] = [vars(module) for module in _users_modules()]
    for _ in range(_DEPTH):
        level = [value for each in level for value in _values_of(each)]
        level = [value for value in level if id(value) not in seen][: MAX_LOOKS - len(seen)]
        seen.update(map(id, level))
        found |= wanted.intersection(map(id, level))
    return found


def _users_modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and file and not is_installed(file):
            yield module


def _values_of(value: Any) -> Iterable[Any]:
    """Return what a container, an object or a class holds, without running code of it."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, ModuleType):
        return ()
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except (AttributeError, TypeError):
        return ()
