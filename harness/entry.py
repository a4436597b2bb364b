"""The pytest entry point: registers the plugin, and that of engines where the installed suites are run.

Every pytest run loads it where Lockstep is installed. `-p no:lockstep` names it. Must not import torch.

PYTEST_DONT_REWRITE: it has no asserts.
"""

from __future__ import annotations

from importlib import import_module

import pytest

from lockstep._alias import come_first
from lockstep.specification import PLUGIN


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    come_first()
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    _register(pluginmanager, PLUGIN)
    if config is not None and _runs_suites(config):
        _register(pluginmanager, "lockstep.conformance.plugin")


def _register(pluginmanager: pytest.PytestPluginManager, name: str) -> None:
    plugin = import_module(name)
    if not (pluginmanager.is_registered(plugin) or pluginmanager.is_blocked(name)):
        pluginmanager.register(plugin, name)  # else `-p` has named it


def _runs_suites(config: pytest.Config) -> bool:
    """Return whether an argument names our suites, as in `pytest --pyargs lockstep_suites.core`."""
    options = config.known_args_namespace
    return options.pyargs and any(arg.split(".")[0] == "lockstep_suites" for arg in options.file_or_dir)
