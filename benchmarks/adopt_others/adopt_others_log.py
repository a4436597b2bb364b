"""A plugin of pytest that writes a line for each test as it ends: a run that is ended has results, too.

`$ADOPT_OTHERS_LOG` names the file. With `$ADOPT_OTHERS_STARTS`, for runs before adoption, it also counts how
a test starts processes: "spawn() spawn 2" are two of the start method spawn, by torch.multiprocessing.spawn.
Child processes do not get the variables.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

CALLERS = {
    "torch.testing._internal.common_distributed": "MultiProcessTestCase",
    "torch.multiprocessing.spawn": "spawn()",
    "torch.multiprocessing.pool": "Pool",
    "multiprocessing.pool": "Pool",
    "multiprocessing.managers": "Manager",
    "concurrent.futures.process": "ProcessPoolExecutor",
    "torch.utils.data.dataloader": "DataLoader",
}
"""Modules that start processes for a test, and what the table calls them."""


class Log:
    """Writes the verdict, the seconds and the message of each test."""

    def __init__(self, path: str, starts: Starts | None) -> None:
        self._path = path
        self._starts = starts
        self._test: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Begin to count."""
        if self._starts:
            self._starts.counts.clear()
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the reports of a test; write them with the last."""
        if report.when == "setup":
            self._test = {"name": report.nodeid, "verdict": "passed", "seconds": 0.0, "message": ""}
        self._test["seconds"] += report.duration
        if report.failed or (report.skipped and self._test["verdict"] == "passed"):
            xfailed = report.skipped and hasattr(report, "wasxfail")
            self._test["verdict"] = "failed" if report.failed else "xfailed" if xfailed else "skipped"
            self._test["message"] = message(report)
        if report.when == "teardown":
            counts = self._starts.counts if self._starts else {}
            self._test["starts"] = ", ".join(f"{how} {count}" for how, count in sorted(counts.items()))
            with open(self._path, "a") as log:
                log.write(json.dumps(self._test) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write what cannot be collected as a failed test."""
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            test = {"name": report.nodeid, "verdict": "failed", "seconds": 0.0, "message": " ".join(lines)}
            with open(self._path, "a") as log:
                log.write(json.dumps(test) + "\n")


class Starts:
    """Counts by wrapping `start` of all processes of multiprocessing, and by an audit hook."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        original, counts = BaseProcess.start, self.counts

        def start(process: BaseProcess) -> None:
            counts[f"{caller()} {method(process)}"] += 1
            original(process)

        BaseProcess.start = start  # type: ignore[method-assign]
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            words = [str(word) for word in args[1]] if isinstance(args[1], list | tuple) else [str(args[1])]
            ranks = any(
                name in word for word in words for name in ("torchrun", "distributed.run", "accelerate")
            )
            self.counts["torchrun" if ranks else "subprocess"] += 1
        elif (
            event == "os.fork" and sys._getframe(1).f_globals.get("__name__") != "multiprocessing.popen_fork"
        ):
            self.counts["os.fork"] += 1  # that of multiprocessing is counted where it starts


def caller() -> str:
    """Return what called `start`, as the table has it."""
    frame = sys._getframe(1)
    found = "Process"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in CALLERS:
            found = CALLERS[name]
            if found != "spawn()":  # MultiProcessTestCase and pools may be above it
                break
        frame = frame.f_back
    return found


def method(process: BaseProcess) -> str:
    """Return the start method of a process."""
    return getattr(process, "_start_method", None) or multiprocessing.get_start_method()


def message(report: pytest.TestReport) -> str:
    """Return why a test failed or was skipped, in a line."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " ".join(lines)[-400:]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the process that was started with the variables."""
    if path := os.environ.pop("ADOPT_OTHERS_LOG", None):
        starts = Starts() if os.environ.pop("ADOPT_OTHERS_STARTS", None) else None
        config.pluginmanager.register(Log(path, starts))
