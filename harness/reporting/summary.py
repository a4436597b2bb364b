"""The end of a run: subtests of ranks are counted, and a `--subtest` that chooses no case is no success.

Runs in the controller, and in the main process of pytest-xdist; must not import torch.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lockstep.protocol import OF_RANKS
from lockstep.subtests import NO_CASE_OF

_OF_NO_TEST = {"", "skipped", "deselected", "warnings"}
"""Kinds of reports that there are where no test has run."""
SUBTESTS = "subtests passed"
"""pytest's words for those that it counts under `-v` and `-q`, and not otherwise."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
    result = yield
    for reason in _unmatched(terminalreporter):
        terminalreporter.write_line(f"{reason}: no test ran", red=True)
    count_subtests(terminalreporter.stats)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the run as `-k` does that selects no test, where no test has a case that `--subtest` chooses."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.OK and reporter is not None and _unmatched(reporter):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _unmatched(reporter: pytest.TerminalReporter) -> list[str]:
    """Return why tests were skipped, if all were as `--subtest` chose none of their cases."""
    if not reporter.config.getoption("subtest") or reporter.stats.keys() - _OF_NO_TEST:
        return []
    skipped = [report.longrepr for report in reporter.stats.get("skipped", ())]
    reasons = [why[2].removeprefix("Skipped: ") for why in skipped if isinstance(why, tuple)]
    return sorted({why for why in reasons if why.startswith(NO_CASE_OF)})


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
