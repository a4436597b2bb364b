"""Conformance: engines behind one interface, held to the same claims, and tables of which engine holds which.

The public names are loaded on first use, so that names of engines can be checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lockstep.conformance.adapters.adapter import Adapter
    from lockstep.conformance.adapters.replicated import Replicated
    from lockstep.conformance.capabilities import Capability, NotOffered, offers, require
    from lockstep.conformance.interface import (
        Composable,
        Engine,
        Snapshot,
        StateDicts,
        Traffic,
        Wrapper,
        trainee,
    )
    from lockstep.conformance.registry import EngineError, find, known_names
    from lockstep.conformance.spec import Precision, ProcessGroups, ShardSpec, chosen_modules

_NAMES = {
    "lockstep.conformance.adapters.adapter": ("Adapter",),
    "lockstep.conformance.adapters.replicated": ("Replicated",),
    "lockstep.conformance.capabilities": ("Capability", "NotOffered", "offers", "require"),
    "lockstep.conformance.interface": (
        "Composable",
        "Engine",
        "Snapshot",
        "StateDicts",
        "Traffic",
        "Wrapper",
        "trainee",
    ),
    "lockstep.conformance.registry": ("EngineError", "find", "known_names"),
    "lockstep.conformance.spec": ("Precision", "ProcessGroups", "ShardSpec", "chosen_modules"),
}

__all__ = [
    "Adapter",
    "Capability",
    "Composable",
    "Engine",
    "EngineError",
    "NotOffered",
    "Precision",
    "ProcessGroups",
    "Replicated",
    "ShardSpec",
    "Snapshot",
    "StateDicts",
    "Traffic",
    "Wrapper",
    "chosen_modules",
    "find",
    "known_names",
    "offers",
    "require",
    "trainee",
]

__getattr__ = lazy_exports(__name__, _NAMES)
