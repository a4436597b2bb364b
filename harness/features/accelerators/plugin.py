"""The plugin of accelerators: a guard in each rank."""

from __future__ import annotations

import pytest

from lockstep.hookspecs import RANK_PLUGIN

_GUARD = "lockstep.features.accelerators.guard"


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append(_GUARD)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.accelerators.guard import AcceleratorGuard

        config.pluginmanager.register(AcceleratorGuard())
