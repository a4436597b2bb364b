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


def plugins() -> Iterator[ModuleType]:
    """Import the plugin of each feature."""
    for folder in iter_modules(__path__, f"{__name__}."):
        yield import_module(f"{folder.name}.plugin")


def feature_commands() -> Iterator[ModuleType]:
    """Import the command of each feature that has one."""
    for folder in iter_modules(__path__, f"{__name__}."):
        if find_spec(name := f"{folder.name}.command"):
            yield import_module(name)


def register_features(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin of each feature."""
    for plugin in plugins():
        pluginmanager.register(plugin, plugin.__name__)
