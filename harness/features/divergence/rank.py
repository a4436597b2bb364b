"""Records the run of an item that is to explain a divergence. Runs inside a rank; imports torch."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lockstep.features.divergence import FEATURE
from lockstep.protocol import RunItem
from lockstep.recorders import ExecutionLog


class RecordedItem:
    """Records what one item computes.

    Args:
        base: directory that the user's files are named from.
    """

    def __init__(self, base: str) -> None:
        self._base = base

    @pytest.hookimpl(wrapper=True)
    def pytest_ranks_run_item(self, item: pytest.Item, order: RunItem) -> Generator[None, object, object]:
        option = item.config.option
        selected = option.subtest
        option.subtest = list(order.parts[FEATURE]) or selected
        try:
            with ExecutionLog(self._base):
                return (yield)
        finally:
            option.subtest = selected
            item.config.pluginmanager.unregister(self)
