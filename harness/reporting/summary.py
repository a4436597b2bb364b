"""The end of a run's report: subtests that have passed on ranks are counted.

Runs in the controller, and in the main process of pytest-xdist; must not import torch.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lockstep.protocol import OF_RANKS

SUBTESTS = "subtests passed"
"""pytest's words for those that it counts under `-v` and `-q`, and not otherwise."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
    result = yield
    count_subtests(terminalreporter.stats)
    return result


def count_subtests(stats: dict[str, list[object]]) -> None:
    """Count the subtests that have passed, where some ran on ranks; pytest leaves them out without `-v`."""
    silent = stats.get("", [])
    passed = [
        report
        for report in silent
        if isinstance(report, pytest.TestReport)
        and hasattr(report, "context")
        and report.passed
        and not hasattr(report, "wasxfail")
    ]
    if any(hasattr(report, OF_RANKS) for report in passed):
        counted = {id(report) for report in passed}
        stats[""] = [report for report in silent if id(report) not in counted]
        stats.setdefault(SUBTESTS, []).extend(passed)
