"""Features: folders that add to the core by hooks, options and fixtures, and that the core does not know.

Each has a module `plugin`, which every pytest process loads, controllers and ranks: it must not import torch,
and imports the rest of its folder when that is needed. A folder that is deleted takes its feature with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def plugin_names() -> Iterator[str]:
    """Yield the names of the modules that are the plugins of features."""
    for folder in iter_modules(__path__, f"{__name__}."):
        yield f"{folder.name}.plugin"


def plugins() -> Iterator[ModuleType]:
    """Import the plugin of each feature."""
    yield from map(import_module, plugin_names())


def feature_commands() -> Iterator[ModuleType]:
    """Import the command of each feature that has one."""
    for folder in iter_modules(__path__, f"{__name__}."):
        if find_spec(name := f"{folder.name}.command"):
            yield import_module(name)


def register_features(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin of each feature."""
    pluginmanager.register(import_module(__name__), __name__)
    for plugin in plugins():
        pluginmanager.register(plugin, plugin.__name__)


def pytest_ranks_imports(hints: list[str]) -> None:
    """Let the server import these plugins once: a third of what a new rank did before its first item."""
    hints.extend(plugin_names())
