"""Counts of calls of `spawn` and processes, shown at the end of a run. In the controller, and above workers.

Must not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

_OUTPUT = "harness-spawned"
"""Key under which a worker of pytest-xdist leaves its counts for the main process."""
Level = Literal["on warm ranks", "not on warm ranks", "from the server", "in new interpreters"]
"""The way in which a call of `spawn`, or a process, came to run."""


class Counts:
    """Counts of this process, and in the main one of pytest-xdist those of its workers.

    Args:
        end_all: ends the processes that fixtures have left when the session is over; returns a line for each.
    """

    def __init__(self, config: pytest.Config, end_all: Callable[[], Sequence[str]]) -> None:
        self._config = config
        self._end_all = end_all
        self._counts: Counter[tuple[Level, str]] = Counter()
        """Numbers of them by how they came to run, with the reason where it is not the best way."""
        self._left: list[str] = []

    def add(self, level: Level, why_not: str) -> None:
        """Count a call, or a process."""
        self._counts[level, why_not] += 1

    @pytest.hookimpl(trylast=True)  # fixtures are torn down here after `-x`
    def pytest_sessionfinish(self) -> None:
        self._left += self._end_all()
        if hasattr(self._config, "workerinput"):  # of pytest-xdist
            output = list(self._counts.items()), self._left
            self._config.workeroutput[_OUTPUT] = output  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts, left = getattr(node, "workeroutput", {}).get(_OUTPUT, ((), ()))
        for key, count in counts:
            self._counts[tuple(key)] += count
        self._left += left

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._left:
            terminalreporter.write_line(f"ranks_adopt: {line}")
        if self._config.getoption("ranks_adopt_report") and self._counts:
            terminalreporter.section("adopted processes", sep="-")
            for text in _lines(self._counts):
                terminalreporter.write_line(text)


def _lines(counts: Counter[tuple[Level, str]]) -> Sequence[str]:
    """Return the counts in words."""
    lines = []
    for (level, why), count in sorted(counts.items()):
        noun = "call of spawn" if level.endswith("ranks") else "process"
        plural = "calls of spawn" if level.endswith("ranks") else "processes"
        lines.append(f"{count} {noun if count == 1 else plural} {level}{why and ': '}{why}")
    return lines
