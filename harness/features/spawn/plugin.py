"""The plugin of `ranks_adopt = spawn`: processes that tests start come from the server of the ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.features.adopt.plugin import families_of
from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN

FAMILY = "spawn"
WAYS = ("worlds", "processes")
"""Values of the option `ranks_adopt_spawn`."""
_STARTS_PROCESSES = re.compile(rb"multiprocessing|start_processes|\bspawn\b")
_is_mentioned: pytest.StashKey[bool] = pytest.StashKey()
"""Presence of a file of tests that may start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_adopt_spawn",
        "where adopted calls of torch.multiprocessing.spawn run: worlds (on warm ranks where that is safe), "
        "or processes (each in processes of its own)",
        default="worlds",
    )


@pytest.hookimpl(trylast=True)  # behind the check of the words
def pytest_configure(config: pytest.Config) -> None:
    """Check the option, and register the half of this side.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    config.addinivalue_line(
        "markers", "own_processes: a test in which ranks_adopt = spawn runs no call of spawn on warm ranks"
    )
    if (value := config.getini("ranks_adopt_spawn")) not in WAYS:
        raise pytest.UsageError(f"ranks_adopt_spawn = {value!r}: choose {', '.join(WAYS)}")
    if FAMILY not in families_of(config):
        return
    if session := config.pluginmanager.get_plugin(RANK_PLUGIN):
        from lockstep.features.spawn.rank import SpawnOnRank

        config.pluginmanager.register(SpawnOnRank(session), "harness-spawn")
        return
    from lockstep.features.spawn.controller import SpawnAdoption
    from lockstep.features.spawn.counts import Counts
    from lockstep.features.spawn.processes import TestProcesses
    from lockstep.features.spawn.worlds import SpawnOnWorlds

    processes = TestProcesses(config)
    counts = Counts(config, processes.end_all)
    config.pluginmanager.register(counts, "harness-spawn-counts")
    controller: Any = config.pluginmanager.get_plugin(CONTROLLER_PLUGIN)
    if controller is None:  # the main process of `pytest -n`
        return
    worlds = SpawnOnWorlds(config, controller.prepare, processes.pids)
    adoption = SpawnAdoption(config, controller.ready_launcher, worlds, processes, counts)
    config.pluginmanager.register(worlds, "harness-spawn-worlds")
    config.pluginmanager.register(adoption, "harness-spawn")
    config.pluginmanager.register(processes, "harness-spawn-processes")


# In the controller


def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> bool:
    """Return whether a file may start processes; another one finds the server when it starts the first."""
    # The controller looks into files that are arguments before this plugin is configured.
    if FAMILY not in families_of(config) or _STARTS_PROCESSES.search(text) is None:
        return False
    config.stash[_is_mentioned] = True
    return True


def pytest_ranks_needs_server(config: pytest.Config) -> bool:
    return config.stash.get(_is_mentioned, False)


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    if FAMILY in families_of(config):
        hints += ("torch.multiprocessing", "lockstep.features.spawn.child", "lockstep.features.spawn.rank")
