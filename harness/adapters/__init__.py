"""One face for the engines that the suites hold to the same behaviour.

The public names are loaded on first use, so that names of engines can be checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.lazy import from_homes

if TYPE_CHECKING:
    from harness.adapters.capabilities import Capability, NotOffered, offers, require
    from harness.adapters.face import Composable, Engine, Group, Traffic
    from harness.adapters.finding import EngineError, find, known_names
    from harness.adapters.replicas import Replicas
    from harness.adapters.spec import Precision, ProcessGroups, ShardSpec

_HOMES = {
    "Capability": "harness.adapters.capabilities",
    "Composable": "harness.adapters.face",
    "Engine": "harness.adapters.face",
    "EngineError": "harness.adapters.finding",
    "Group": "harness.adapters.face",
    "NotOffered": "harness.adapters.capabilities",
    "Precision": "harness.adapters.spec",
    "ProcessGroups": "harness.adapters.spec",
    "Replicas": "harness.adapters.replicas",
    "ShardSpec": "harness.adapters.spec",
    "Traffic": "harness.adapters.face",
    "find": "harness.adapters.finding",
    "known_names": "harness.adapters.finding",
    "offers": "harness.adapters.capabilities",
    "require": "harness.adapters.capabilities",
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

__getattr__ = from_homes(__name__, _HOMES)
