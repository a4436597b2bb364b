"""Plugins of others in a rank's session: what they expect of a worker of pytest-xdist, and what if they fail.

Runs inside a rank; imports pytest only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from harness.protocol import Warned
from harness.rank.pytest_internals import hook_functions

GUARDED = ("pytest_configure", "pytest_sessionstart")
"""The hooks in which plugins set themselves up, and in which pytest lets any error end the session."""


def worker_input(given: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return what the session of a rank has as `config.workerinput`, and set the variables that go with it.

    Outside of pytest-xdist each rank is a worker of its own, "gw0" to "gwN": plugins and conftests take the
    number for ports, databases and files of a process. Under `pytest -n` ranks are called as their worker.
    """
    if given["workerid"] != "master":
        return {**given}
    made = {**given, "workerid": f"gw{rank}", "workercount": size}
    os.environ["PYTEST_XDIST_WORKER"] = made["workerid"]
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(size)
    os.environ["PYTEST_XDIST_TESTRUNUID"] = str(given["testrunuid"])
    return made


class LeftOut:
    """Leaves installed plugins out that fail as the session starts: the tests of ranks run without them.

    Conftests and plugins of the project itself are not left out: what they raise is its own fault.
    """

    def __init__(self) -> None:
        self._warnings: list[Warned] = []

    def guard(self, config: pytest.Config) -> None:
        """Catch what installed plugins raise in the hooks that are to come."""
        manager = config.pluginmanager
        installed = {id(plugin): dist for plugin, dist in manager.list_plugin_distinfo()}
        for hook in GUARDED:
            for implementation in hook_functions(config, hook):
                if (dist := installed.get(id(implementation.plugin))) is not None:
                    name = f"{dist.project_name} {dist.version}"
                    failed = partial(self._leave_out, manager, implementation.plugin, name)
                    implementation.function = _guarded(implementation.function, failed)

    def take(self) -> list[Warned]:
        """Return what was not sent yet."""
        taken, self._warnings = self._warnings, []
        return taken

    def _leave_out(
        self, manager: pytest.PytestPluginManager, plugin: object, name: str, error: Exception
    ) -> None:
        option = manager.get_name(plugin)
        manager.unregister(plugin)
        text = (
            f"the plugin {name} fails in ranks and is left out there ({type(error).__name__}: {error}); "
            f"-p no:{option} leaves it out of the run"
        )
        file = getattr(plugin, "__file__", None) or __file__
        self._warnings.append(Warned("pytest", "PytestWarning", text, file, 1))


def _guarded(function: Callable[..., object], failed: Callable[[Exception], None]) -> Callable[..., object]:
    def call(*args: object) -> object:
        try:
            return function(*args)
        except Exception as error:  # pytest.exit and the like are no Exception: they are meant
            failed(error)
            return None

    return call
