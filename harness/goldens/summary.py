"""The lines about goldens at the end of a run: which were written, and which no test has used.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

_KEY = pytest.StashKey["GoldenSummary"]()


def note_goldens(config: pytest.Config, reports: Sequence[pytest.TestReport]) -> None:
    """Note the goldens that a test has used."""
    if _KEY not in config.stash:
        config.stash[_KEY] = GoldenSummary(config)
        config.pluginmanager.register(config.stash[_KEY], "harness-goldens")
    summary = config.stash[_KEY]
    for report in reports:
        summary.used.update(Path(str(value)) for name, value in report.user_properties if name == "golden")


class GoldenSummary:
    """A plugin that is registered once a test has requested the fixture `golden`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.used: set[Path] = set()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("update_goldens"):
            terminalreporter.write_line(f"goldens: {len(self.used)} up to date")
        for path in self._unused(terminalreporter):
            where = os.path.relpath(path, self._config.invocation_params.dir)
            terminalreporter.write_line(f"golden that no test has used: {where}; remove it")

    def _unused(self, terminalreporter: pytest.TerminalReporter) -> list[Path]:
        """Return the files beside those that were used; nothing unless all tests ran and passed."""
        option = self._config.option
        selects = any(getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect"))
        stats = terminalreporter.stats
        partial = any(stats.get(kind) for kind in ("failed", "error", "skipped", "deselected", "xfailed"))
        if selects or partial or any("::" in str(arg) for arg in self._config.args):
            return []
        folders = sorted({path.parent for path in self.used})
        found = [path for folder in folders for path in sorted(folder.glob("*.txt"))]
        backends = {path.stem.rpartition("-")[2] for path in self.used}
        return [path for path in found if path not in self.used and path.stem.rpartition("-")[2] in backends]
