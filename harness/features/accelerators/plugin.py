"""The plugin of accelerators: a guard in each rank, and seeds that are queued for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.backends.device import Device
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

_GUARD = "lockstep.features.accelerators.guard"


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append(_GUARD)


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None:
        from lockstep.features.accelerators.guard import AcceleratorGuard
        from lockstep.features.accelerators.torch_internals import format_stacks_late

        format_stacks_late()
        config.pluginmanager.register(AcceleratorGuard(Device(session.rank.spec.key.device)))
