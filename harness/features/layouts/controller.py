"""Layouts in the controller: which items run, and the line on each test at the end. Must not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest

from lockstep.controller.pytest_internals import make_report
from lockstep.features.layouts.mark import AGAIN, Sizes, contains

_PROPERTY = "layout"
"""Property of an item's reports: the name of its test, and of its layout."""


class Layouts:
    """Selects layouts, and skips those that contain one that failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[Sizes]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not any(map(_sizes_of, items)):
            self._config.pluginmanager.unregister(self)  # no test pays for it
        globs: str | None = self._config.getoption("layouts")
        if globs is None:
            return
        patterns = [each.strip() for each in globs.split(",")]
        left_out = [
            item
            for item in items
            if (sizes := _sizes_of(item)) and not any(fnmatchcase(sizes.name, each) for each in patterns)
        ]
        if left_out:
            self._config.hook.pytest_deselected(items=left_out)
            without = set(left_out)
            items[:] = [item for item in items if item not in without]

    @pytest.hookimpl(tryfirst=True)  # a stage of what does not run need not run
    def pytest_ranks_before(self, item: pytest.Item) -> list[pytest.TestReport] | None:
        """Skip a layout that contains one that failed."""
        sizes = _sizes_of(item)
        if sizes is None or self._config.getoption("all_layouts"):
            return None
        for failed in self._failed.get(_test_of(item), ()):
            if contains(sizes, failed):
                why = f"Skipped: contains {failed.name}, which failed"
                longrepr = (str(item.path), (item.location[1] or 0) + 1, why)
                return [
                    self._noted(item, make_report(item, "setup", "skipped", longrepr)),
                    make_report(item, "teardown", "passed"),
                ]
        return None

    def pytest_ranks_reported(self, item: pytest.Item, reports: list[pytest.TestReport]) -> None:
        sizes = _sizes_of(item)
        if sizes is None:
            return
        for report in reports:
            self._noted(item, report)
        if any(report.failed for report in reports):
            self._failed.setdefault(_test_of(item), []).append(sizes)

    def _noted(self, item: pytest.Item, report: pytest.TestReport) -> pytest.TestReport:
        sizes = _sizes_of(item)
        assert sizes is not None, "an item of a layout"
        report.user_properties.append((_PROPERTY, f"{_test_of(item)} {sizes.name}"))
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say of each test how many layouts held, and the smallest that failed."""
        if not hasattr(self._config, "workerinput"):
            selected = self._config.getoption("layouts") is not None
            for line in _lines(terminalreporter.stats, 1 if selected else 2):
                terminalreporter.write_line(line)


def _sizes_of(item: pytest.Item) -> Sizes | None:
    sizes = getattr(getattr(item, "callspec", None), "params", {}).get("layout")
    return sizes if isinstance(sizes, Sizes) else None


def _test_of(item: pytest.Item) -> str:
    """Return the node id of an item without its layout."""
    sizes = _sizes_of(item)
    assert sizes is not None, "an item of a layout"
    test, _, parameters = item.nodeid.partition("[")
    others = f"-{parameters.removesuffix(']')}-".replace(f"-{sizes.name}-", "-", 1).strip("-")
    return f"{test}[{others}]" if others else test


def _size(name: str) -> tuple[int, int]:
    """Return how many ranks and axes a layout has, by its name: `pytest -n` reports in any order."""
    sizes = [int(each) for each in re.findall(r"\d+", name)]
    return math.prod(sizes), len(sizes)


def _lines(stats: dict[str, list[Any]], least: int) -> Iterator[str]:
    """Yield the line on each test that ran on so many layouts: of a single one its verdict says it."""
    found: dict[str, dict[str, str]] = {}
    for kind, reports in stats.items():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY and kind in ("passed", "failed", "error", "skipped"):
                    test, _, layout = value.rpartition(" ")
                    of_test = found.setdefault(test, {})
                    if of_test.get(layout) not in ("failed", "error"):
                        of_test[layout] = "failed" if kind == "error" else kind
    for test, of_test in found.items():
        if len(of_test) < least:
            continue
        counts = {
            kind: [name for name, each in of_test.items() if each == kind]
            for kind in ("passed", "failed", "skipped")
        }
        line = f"layouts of {test}: {len(counts['passed'])} of {len(of_test)} held"
        if failed := counts["failed"]:
            line += f", {len(failed)} failed, {min(failed, key=_size)} the smallest"
        if counts["skipped"]:
            line += f", {len(counts['skipped'])} not run"
        if differ := [
            name for name in of_test if {"passed", "failed"} == {of_test[name], of_test.get(name + AGAIN)}
        ]:
            line += f"; {', '.join(differ)} in one order alone: another layout leaves state in the process"
        yield line
