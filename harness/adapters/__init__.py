"""One face for the engines that the suites hold to the same behaviour.

The public names are loaded on first use, so that names of engines can be checked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.adapters.capabilities import Capability, NotOffered, offers, require
    from harness.adapters.face import Composable, Engine, Group, Traffic
    from harness.adapters.finding import EngineError, find, known_names
    from harness.adapters.replicas import Replicas
    from harness.adapters.spec import Precision, ProcessGroups, ShardSpec

_HOMES = {
    "Capability": "capabilities",
    "Composable": "face",
    "Engine": "face",
    "EngineError": "finding",
    "Group": "face",
    "NotOffered": "capabilities",
    "Precision": "spec",
    "ProcessGroups": "spec",
    "Replicas": "replicas",
    "ShardSpec": "spec",
    "Traffic": "face",
    "find": "finding",
    "known_names": "finding",
    "offers": "capabilities",
    "require": "capabilities",
}

__all__ = [
    "Capability",
    "Composable",
    "Engine",
    "EngineError",
    "Group",
    "NotOffered",
    "Precision",
    "ProcessGroups",
    "Replicas",
    "ShardSpec",
    "Traffic",
    "find",
    "known_names",
    "offers",
    "require",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
