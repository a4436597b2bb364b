"""The engines that a run is about, and the one of an item. Used on both sides; must not import torch."""

from __future__ import annotations

import pytest

DEFAULT = "lockstep"
FIXTURE = "engine_name"
"""The fixture that every use of the plugin's fixture `engine` goes through.

A fixture `engine` of a project's own, which asks for neither, has nothing to do with the engines of a run.
"""


def engines_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the engines under test as `--engine` names them, each once, in the order they were given."""
    return tuple(dict.fromkeys(config.getoption("engine") or [DEFAULT]))


def engine_of(item: pytest.Item) -> str | None:
    """Return the name of the engine that the item runs on; None if it does not ask for one."""
    if FIXTURE not in getattr(item, "fixturenames", ()):
        return None
    engines = engines_of(item.config)
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get(FIXTURE) if callspec is not None and len(engines) > 1 else engines[0]
    return name if name in engines else None


def claim_of(item: pytest.Item) -> str:
    """Return the item's node id without the engine: its id in a run of one engine."""
    nodeid, engine = str(item.nodeid), engine_of(item)
    if engine is None or len(engines_of(item.config)) == 1:
        return nodeid
    if nodeid.endswith(f"[{engine}]"):
        return nodeid.removesuffix(f"[{engine}]")
    return f"{nodeid.removesuffix(f'-{engine}]')}]"
