"""pytest-timeout on ranks: its limit is the deadline of a world. Private names of it, seen in 2.3 and 2.4.

A plugin of the controller, where pytest-timeout is one; must not import torch.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from lockstep.bounds import SECONDS
from lockstep.controller.requests import REQUEST
from lockstep.marker import MarkError, RanksMark
from lockstep.options import DEFAULTS


def pytest_ranks_timeout(item: pytest.Item, mark: RanksMark) -> float | None:
    """Return the limit of pytest-timeout for an item: a mark's before an option's, ours before its own.

    If it moves: what `pytest_timeout.pytest_runtest_protocol` asks for an item, and what its
    `pytest_configure` stores in the config.
    """
    config, limit = item.config, None
    of_run: float | None = getattr(config, "_env_timeout", None) or None
    if mark.timeout:
        return None
    if item.get_closest_marker("timeout") is not None:
        plugin: Any = sys.modules["pytest_timeout"]
        seconds: float | None = plugin._get_item_settings(item).timeout
        limit = of_run if seconds is None else seconds or float("inf")  # 0 is none
    elif config.getoption("world_timeout") == DEFAULTS["world_timeout"]:
        limit = of_run
    if limit is not None and math.isnan(limit):
        raise MarkError(f"timeout of pytest-timeout is nan: write {SECONDS}, or 0 for none")
    return limit


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    """Keep pytest-timeout from interrupting this process: its limit is the deadline of the world."""
    return True if REQUEST in item.stash else None
