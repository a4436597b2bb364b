"""The plugin of `ranks_adopt = spawn`: processes that tests start come from the server of the ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.adopt.plugin import families_of
from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.features.spawn.controller import SpawnAdoption

FAMILY = "spawn"
_STARTS_PROCESSES = re.compile(rb"multiprocessing|start_processes|\bspawn\b")
_adoption: pytest.StashKey[SpawnAdoption] = pytest.StashKey()


@pytest.hookimpl(trylast=True)  # behind the check of the words
def pytest_configure(config: pytest.Config) -> None:
    if FAMILY not in families_of(config) or config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    from lockstep.features.spawn.controller import SpawnAdoption

    controller: Any = config.pluginmanager.get_plugin(CONTROLLER_PLUGIN)
    adoption = config.stash[_adoption] = SpawnAdoption(config, controller.ready_launcher)
    config.pluginmanager.register(adoption, "harness-spawn")


# In the controller


def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> bool:
    """Return whether a file may start processes; another one finds the server when it starts the first."""
    adoption = config.stash.get(_adoption, None)
    if adoption is None or _STARTS_PROCESSES.search(text) is None:
        return False
    adoption.is_mentioned = True
    return True


def pytest_ranks_needs_server(config: pytest.Config) -> bool:
    adoption = config.stash.get(_adoption, None)
    return adoption is not None and adoption.is_mentioned


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    if FAMILY in families_of(config):
        hints += ("torch.multiprocessing", "lockstep.features.spawn.child")
