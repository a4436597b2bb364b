"""Lockstep: a pytest-native, multi-rank test harness for PyTorch.

The public names are loaded on first use, so that the plugin can be imported without torch.

PYTEST_DONT_REWRITE: ranks are forked from a server that has imported this package before pytest could
rewrite its asserts; the package raises its own messages and needs no rewriting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.names import lazy_exports, share

if TYPE_CHECKING:
    from harness.exceptions import InjectedFault, PeerFailed, RankLeakWarning, RankStateWarning
    from harness.injection.faults import Fault
    from harness.injection.search import schedules
    from harness.rank.world_fixture import RankWorld
    from harness.recorders import CollectivesLog, ForwardDtypes
    from harness.stages import stage
    from harness.subtests import RunSubtests

_NAMES = {
    "harness.exceptions": ("InjectedFault", "PeerFailed", "RankLeakWarning", "RankStateWarning"),
    "harness.injection.faults": ("Fault",),
    "harness.injection.search": ("schedules",),
    "harness.rank.world_fixture": ("RankWorld",),
    "harness.recorders": ("CollectivesLog", "ForwardDtypes"),
    "harness.stages": ("stage",),
    "harness.subtests": ("RunSubtests",),
}

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

if __name__ == "harness":  # not by the name `lockstep`
    share()
