"""A pytest plugin of `benchmarks/power.py`, in the controller and in ranks: which claim runs which lines.

With LOCKSTEP_CLAIMS_RECORD set to a folder, each process adds the lines of the engine that a claim runs to a
file of its own there. With LOCKSTEP_CLAIMS_ORDER set to a file of node ids these run alone, in that order, as
long as LOCKSTEP_CLAIMS_SECONDS says; what failed first, "late" if by a deadline, and how
many ran, is written beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

ENGINE = Path(lockstep.__file__).parent / "engine"
RECORD, ORDER, SECONDS = (f"LOCKSTEP_CLAIMS_{name}" for name in ("RECORD", "ORDER", "SECONDS"))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to measure another engine than that of this directory."""
    if not ENGINE.is_relative_to(config.rootpath):
        raise pytest.UsageError(f"the engine is that of {ENGINE}, not one below {config.rootpath}")
    if (order := os.environ.get(ORDER)) and not config.pluginmanager.hasplugin("harness-rank"):
        config.pluginmanager.register(Watch(Path(order).parent, float(os.environ[SECONDS])))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the lines that an item runs, in each of its processes, and how long it takes."""
    if not (folder := os.environ.get(RECORD)):
        return (yield)
    import coverage

    tracer = coverage.Coverage(data_file=None, include=[f"{ENGINE}/*"], config_file=False)
    tracer.set_option("run:disable_warnings", ["no-data-collected"])
    started = time.perf_counter()
    tracer.start()
    try:
        return (yield)
    finally:
        tracer.stop()
        seconds = round(time.perf_counter() - started, 3)
        data = tracer.get_data()
        lines = {Path(file).name: sorted(data.lines(file) or ()) for file in data.measured_files()}
        with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([item.nodeid, seconds, lines]) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the claims of the file that is given, in its order."""
    if order := os.environ.get(ORDER):
        places = {name: place for place, name in enumerate(Path(order).read_text().splitlines())}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
        items[:] = sorted((i for i in items if i.nodeid in places), key=lambda item: places[item.nodeid])


class Watch:
    """Writes down the first failure and how many claims ran, and ends the run when its time is up."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.failed, self.tried = folder / "failed.txt", folder / "tried.txt"
        self.ends = time.monotonic() + seconds
        self.names: set[str] = set()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.names.add(report.nodeid)
        self.tried.write_text(str(len(self.names)))
        if report.failed and not self.failed.exists():
            late = "late" if "timed out after" in str(report.longrepr) else ""
            self.failed.write_text(f"{report.nodeid}\n{late}")
        if report.when == "teardown" and time.monotonic() > self.ends:
            self.session.shouldstop = "its time is up"
