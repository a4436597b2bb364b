"""Lockstep: a pytest-native, multi-rank test harness for PyTorch.

The public names are loaded on first use, so that the plugin can be imported without torch.

PYTEST_DONT_REWRITE: ranks are forked from a server that has imported this package before pytest could
rewrite its asserts; the package raises its own messages and needs no rewriting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep._alias import resolve_harness
from lockstep.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lockstep.exceptions import InjectedFault, PeerFailed, RankLeakWarning, RankStateWarning
    from lockstep.features.injection.faults import Fault
    from lockstep.features.injection.search import schedules
    from lockstep.features.stages.stage import stage
    from lockstep.rank.world_fixture import RankWorld
    from lockstep.recorders import CollectivesLog, ForwardDtypes
    from lockstep.subtests import RunSubtests

_NAMES = {
    "lockstep.exceptions": ("InjectedFault", "PeerFailed", "RankLeakWarning", "RankStateWarning"),
    "lockstep.features.stages.stage": ("stage",),
    "lockstep.features.injection.faults": ("Fault",),
    "lockstep.features.injection.search": ("schedules",),
    "lockstep.rank.world_fixture": ("RankWorld",),
    "lockstep.recorders": ("CollectivesLog", "ForwardDtypes"),
    "lockstep.subtests": ("RunSubtests",),
}

pytest_plugins = ["lockstep.plugin"]  # of `-p lockstep` where its entry point is not installed

__all__ = [
    "CollectivesLog",
    "Fault",
    "ForwardDtypes",
    "InjectedFault",
    "PeerFailed",
    "RankLeakWarning",
    "RankStateWarning",
    "RankWorld",
    "RunSubtests",
    "schedules",
    "stage",
]

__getattr__ = lazy_exports(__name__, _NAMES)

if __name__ == "harness":
    resolve_harness()
