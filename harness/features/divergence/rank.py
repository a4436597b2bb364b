"""Marks the reports of divergences, and records a run that is to explain one. Runs inside a rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from lockstep.exceptions import Diverged
from lockstep.features.divergence import DIVERGED, FEATURE
from lockstep.protocol import RunItem


class Divergences:
    """Sees divergences in the items of a rank, and records what items compute that run again for one.

    Args:
        base: directory that the user's files are named from.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._is_property = False
        self._raised: BaseException | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_ranks_run_item(self, item: pytest.Item, order: RunItem) -> Generator[None, object, object]:
        # Its search for a smaller example ends with a recorded run of that.
        self._is_property = bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
        if FEATURE not in order.parts:
            return (yield)
        from lockstep.recorders import ExecutionLog

        option = item.config.option
        selected = option.subtest
        option.subtest = list(order.parts[FEATURE]) or selected
        try:
            with ExecutionLog(self._base):
                return (yield)
        finally:
            option.subtest = selected

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self._raised = call.excinfo and call.excinfo.value

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        data = yield
        has_diverged = isinstance(self._raised, Diverged) and not self._is_property
        if has_diverged and report.failed and data is not None:
            data[DIVERGED] = report.context.msg or "" if isinstance(report, pytest.SubtestReport) else ""
        self._raised = None
        return data
