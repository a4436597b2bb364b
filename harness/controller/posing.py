"""What ranks have from plugins for posing as workers of pytest-xdist.

Plugins leave to the main process what is done once a run, and know a worker by its `workerinput`. Some look
in it for what their own part in the main process has put there.
Runs in the controller; must not import torch.
"""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from harness.exceptions import LaunchError


@dataclass(frozen=True)
class _Node:
    """What plugins use of pytest-xdist's handle on a worker."""

    config: pytest.Config
    workerinput: dict[str, Any]
    gateway: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="master"))


def workerinput_of(config: pytest.Config) -> dict[str, Any]:
    """Return what ranks take for their `workerinput`, filled by plugins as for a worker of pytest-xdist.

    Raises:
        LaunchError: a plugin's hook for this fails.
    """
    given: dict[str, Any] | None = getattr(config, "workerinput", None)  # this is a worker itself
    if given is not None:
        return given
    told = {"workerid": "master", "workercount": 1, "testrunuid": uuid.uuid4().hex, "mainargv": sys.argv}
    if hasattr(config.option, "randomly_seed"):  # of pytest-randomly, which has it told by pytest-xdist alone
        told["randomly_seed"] = config.option.randomly_seed
    if config.pluginmanager.hasplugin("xdist"):
        try:
            _let_plugins_fill(config, told)
        except Exception as error:
            raise LaunchError(
                "a plugin's hook `pytest_configure_node`, for workers of pytest-xdist and for ranks, failed: "
                f"{type(error).__name__}: {error}. Leave that plugin out with -p no:NAME"
            ) from error
    return told


def _let_plugins_fill(config: pytest.Config, told: dict[str, Any]) -> None:
    manager = config.pluginmanager
    # Ranks are measured in a way of their own, and pytest-cov has no such hook but under pytest -n.
    without = [plugin for plugin in (manager.get_plugin("_cov"),) if plugin is not None]
    manager.subset_hook_caller("pytest_configure_node", without)(node=_Node(config, told))
