"""pytest-timeout on ranks: its limit is the deadline of a world. Private names of it, seen in 2.3 and 2.4.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of pytest-timeout for one item, in seconds.

    Attributes:
        of_mark: that of the mark `timeout`; infinity for 0, which means none.
        of_run: that of `--timeout`, PYTEST_TIMEOUT or the ini option.
    """

    of_mark: float | None = None
    of_run: float | None = None


def limits_of(item: pytest.Item) -> Limits:
    """Return the limits that pytest-timeout has for an item; none where it is not installed.

    If it moves: what `pytest_timeout.pytest_runtest_protocol` asks for an item, and what its
    `pytest_configure` stores in the config.
    """
    plugin: Any = sys.modules.get("pytest_timeout")
    if not hasattr(plugin, "_get_item_settings") or not item.config.pluginmanager.is_registered(plugin):
        return Limits()
    of_run = getattr(item.config, "_env_timeout", None) or None
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return Limits(of_run=of_run)
    seconds: float | None = plugin._get_item_settings(item).timeout
    return Limits(of_run if seconds is None else seconds or float("inf"), of_run)
