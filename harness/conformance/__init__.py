"""One face for the engines that the suites hold to the same behaviour.

The public names are loaded on first use, so that names of engines can be checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness._lazy import lazy_exports

if TYPE_CHECKING:
    from harness.conformance.adapters.replicated import Replicas
    from harness.conformance.capabilities import Capability, NotOffered, offers, require
    from harness.conformance.interface import Composable, Engine, Group, Traffic
    from harness.conformance.registry import EngineError, find, known_names
    from harness.conformance.spec import Precision, ProcessGroups, ShardSpec

_HOMES = {
    "Capability": "harness.conformance.capabilities",
    "Composable": "harness.conformance.interface",
    "Engine": "harness.conformance.interface",
    "EngineError": "harness.conformance.registry",
    "Group": "harness.conformance.interface",
    "NotOffered": "harness.conformance.capabilities",
    "Precision": "harness.conformance.spec",
    "ProcessGroups": "harness.conformance.spec",
    "Replicas": "harness.conformance.adapters.replicated",
    "ShardSpec": "harness.conformance.spec",
    "Traffic": "harness.conformance.interface",
    "find": "harness.conformance.registry",
    "known_names": "harness.conformance.registry",
    "offers": "harness.conformance.capabilities",
    "require": "harness.conformance.capabilities",
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

__getattr__ = lazy_exports(__name__, _HOMES)
