"""Conformance: engines behind one interface, held to the same claims, and tables of which engine holds which.

The public names are loaded on first use, so that names of engines can be checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.names import lazy_exports

if TYPE_CHECKING:
    from harness.conformance.adapters.adapter import Adapter
    from harness.conformance.adapters.replicated import Replicated
    from harness.conformance.capabilities import Capability, NotOffered, offers, require
    from harness.conformance.interface import (
        Composable,
        Engine,
        Snapshot,
        StateDicts,
        Traffic,
        Wrapper,
        trainee,
    )
    from harness.conformance.registry import EngineError, find, known_names
    from harness.conformance.spec import Precision, ProcessGroups, ShardSpec, chosen_modules

_NAMES = {
    "harness.conformance.adapters.adapter": ("Adapter",),
    "harness.conformance.adapters.replicated": ("Replicated",),
    "harness.conformance.capabilities": ("Capability", "NotOffered", "offers", "require"),
    "harness.conformance.interface": (
        "Composable",
        "Engine",
        "Snapshot",
        "StateDicts",
        "Traffic",
        "Wrapper",
        "trainee",
    ),
    "harness.conformance.registry": ("EngineError", "find", "known_names"),
    "harness.conformance.spec": ("Precision", "ProcessGroups", "ShardSpec", "chosen_modules"),
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
