"""Plugins of others in a rank's session: what they expect of a worker of pytest-xdist, and what if they fail.

Runs inside a rank; imports pytest only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from lockstep.protocol import Warned
from lockstep.rank.pytest_internals import hook_functions


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

    Attributes:
        warnings: One for each plugin that was left out, until they are sent.
    """

    def __init__(self) -> None:
        self.warnings: list[Warned] = []

    def guard(self, config: pytest.Config, hook: str) -> None:
        """Catch what installed plugins, and what they have registered, raise in the coming call of a hook."""
        manager = config.pluginmanager
        found = manager.list_plugin_distinfo()
        installed = {_package_of(plugin): (manager.get_name(plugin), dist) for plugin, dist in found}
        for implementation in hook_functions(config, hook):
            plugin = implementation.plugin
            if (of := installed.get(_package_of(plugin))) is not None:
                option, dist = of
                name = f"{dist.project_name} {dist.version}"
                text = f"the plugin {name} fails in ranks and is left out there ({{}}); "
                text += f"-p no:{option} leaves it out of the run"
                failed = partial(self._leave_out, manager, plugin, text)
                implementation.function = _guarded(implementation.function, failed)

    def _leave_out(
        self, manager: pytest.PytestPluginManager, plugin: object, text: str, error: Exception
    ) -> None:
        manager.unregister(plugin)
        file = getattr(sys.modules.get(_module_of(plugin)), "__file__", None) or __file__
        text = text.format(f"{type(error).__name__}: {error}")
        self.warnings.append(Warned("pytest", "PytestWarning", text, file, 1))


def _module_of(plugin: object) -> str:
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__


def _package_of(plugin: object) -> str:
    return _module_of(plugin).partition(".")[0]


def _guarded(function: Callable[..., object], failed: Callable[[Exception], None]) -> Callable[..., object]:
    def call(*args: object) -> object:
        try:
            return function(*args)
        except Exception as error:  # pytest.exit and the like are no Exception: they are meant
            failed(error)
            return None

    return call
