"""The engines by their names. Does not import torch before an engine is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.adapters.face import Engine

__all__ = ["find", "known_names"]

_HOMES = {
    "lockstep": "harness.adapters.lockstep:Lockstep",
    "lockstep-composable": "harness.adapters.lockstep_composable:LockstepComposable",
    "torch-fsdp2": "harness.adapters.torch_fsdp2:TorchFsdp2",
    "torch-fsdp1": "harness.adapters.torch_fsdp1:TorchFsdp1",
    "torch-ddp": "harness.adapters.torch_ddp:TorchDdp",
}


def known_names() -> tuple[str, ...]:
    """Return the names that `find` knows, in alphabetical order."""
    return tuple(sorted(_HOMES))


def find(name: str) -> Engine:
    """Return the engine that is called ``name``; ValueError with the known names if there is none."""
    if name not in _HOMES:
        raise ValueError(f"no engine is called {name!r}; known: {', '.join(known_names())}")
    module, _, attribute = _HOMES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)()
    return engine
