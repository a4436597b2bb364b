"""The plugin of leaks: a guard in each rank reports what tests leave open, and ends their processes.

Memory that they have freed is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.features.leaks.guard import LeakGuard, Policy

_GUARD = "lockstep.features.leaks.guard"


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append(_GUARD)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.leaks.guard import FreedMemory

        config.pluginmanager.register(FreedMemory())


def pytest_ranks_guard(policy: Policy) -> LeakGuard:
    from lockstep.features.leaks.guard import LeakGuard

    return LeakGuard(policy)
