"""Failures as annotations of a GitHub Actions run: `::error file=…,line=…,title=…::message`.

Runs where pytest has its terminal; must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.output import truncate
from lockstep.reporting.pytest_internals import ReprFileLocation, places

MAX_MESSAGE = 4000
"""Characters. GitHub shows the beginning of a longer one."""


class Annotations:
    """Collects failures of tests with and without ranks, and writes a line for each at the end."""

    def __init__(self, config: pytest.Config, environ: Mapping[str, str]) -> None:
        self._config = config
        self._root = Path(environ.get("GITHUB_WORKSPACE") or _checkout(config.rootpath)).resolve()
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # "contains 1 failed subtest" adds nothing to the annotation of the subtest.
        if report.failed and not str(report.longrepr).startswith("contains "):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = truncate(report.longreprtext if crash is None else crash.message, MAX_MESSAGE)
        properties = dict(getattr(report, "user_properties", ()))
        if "rerun" in properties:
            message += f"\nre-run: {properties['rerun']}"
        path, lineno = self._place(report, crash)
        title = getattr(report, "head_line", None) or str(report.nodeid)
        where = f"file={_escape_property(path)},line={lineno},title={_escape_property(title)}"
        self._lines.append(f"::error {where}::{_escape(message)}")

    def _place(
        self, report: pytest.TestReport | pytest.CollectReport, crash: ReprFileLocation | None
    ) -> tuple[str, int]:
        """Return the innermost line of the traceback inside the checkout, else the first line of the test."""
        for place in (crash, *reversed(places(report))):
            if place is not None and (inside := self._find(place.path)):
                return inside, place.lineno
        file, first, _ = report.location or (str(report.nodeid).split("::")[0], 0, "")
        return os.path.relpath(self._config.rootpath / file, self._root), (first or 0) + 1

    def _find(self, path: str) -> str | None:
        """Return a path relative to the checkout; pytest makes it relative to either of two directories."""
        for base in (self._config.invocation_params.dir, self._config.rootpath):
            full = (base / path).resolve()
            if full.is_file():
                ours = full.is_relative_to(self._root) and "site-packages" not in full.parts
                return str(full.relative_to(self._root)) if ours else None
        return None


def _checkout(path: Path) -> Path:
    """Return the nearest parent directory that is a git checkout, else the path itself."""
    return next((folder for folder in (path, *path.parents) if (folder / ".git").exists()), path)


def _escape(text: str) -> str:
    """Escape like GitHub's toolkit: https://github.com/actions/toolkit, packages/core/src/command.ts."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
