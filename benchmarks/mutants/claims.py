"""A pytest plugin of `benchmarks/power.py`, in the controller and in ranks: which claims run, and what fails.

With LOCKSTEP_CLAIMS_RECORD set to a folder, each process adds the seconds and the fixtures of a claim to a
file of its own there; `traced/sitecustomize.py` adds the lines that it runs, by what this plugin says is
running. With LOCKSTEP_CLAIMS_ORDER set to a file of node ids these run alone, in that order, as long as
LOCKSTEP_CLAIMS_SECONDS says; what failed first, "late" if by a deadline, and how many ran, is written beside
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent
RECORD, ITEM, ORDER, SECONDS = (f"LOCKSTEP_CLAIMS_{name}" for name in ("RECORD", "ITEM", "ORDER", "SECONDS"))
LATE = ("timed out after", "from pytest-timeout")
"""What the report of a test has that a deadline has ended."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to measure another package than that of this directory."""
    if not PACKAGE.is_relative_to(config.rootpath):
        raise pytest.UsageError(f"the package is {PACKAGE}, not one below {config.rootpath}")
    if (order := os.environ.get(ORDER)) and not config.pluginmanager.hasplugin("harness-rank"):
        config.pluginmanager.register(Watch(Path(order).parent, float(os.environ[SECONDS])))


def write(kind: str, row: list[Any]) -> None:
    with open(Path(os.environ[RECORD]) / f"{os.getpid()}.{kind}", "a") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def running(name: str, shared: list[str]) -> Iterator[None]:
    """Have the lines of this process, and of those that it starts, recorded under a name, and the seconds."""
    before = os.environ.get(ITEM, "")
    os.environ[ITEM] = name
    if tracer := getattr(sys.modules.get("sitecustomize"), "tracer", None):
        sys.settrace(tracer)  # a test before this one may have ended it
    started = time.perf_counter()
    try:
        yield
    finally:
        os.environ[ITEM] = before
        write("names", [name, round(time.perf_counter() - started, 3), shared])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record what an item runs, how long it takes, and the fixtures that it may share with others."""
    if RECORD not in os.environ:
        return (yield)
    cases = item.callspec.indices if hasattr(item, "callspec") else {}
    names = [f"{name}{cases.get(name, 0)}" for name in getattr(item, "fixturenames", ())]
    shared = [f"{node.nodeid}#{name}" for node in item.listchain()[:-1] for name in names]
    with running(item.nodeid, shared):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Iterator[None]:
    """Record what a fixture of a file runs under its own name: each test that uses it may notice a mutant."""
    if RECORD not in os.environ or fixturedef.scope == "function":
        return (yield)
    with running(f"{request.node.nodeid}#{fixturedef.argname}{request.param_index}", []):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and RECORD in os.environ:
        write("failed", [report.nodeid])


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
            late = "late" if any(words in str(report.longrepr) for words in LATE) else ""
            self.failed.write_text(f"{report.nodeid}\n{late}")
        if report.when == "teardown" and time.monotonic() > self.ends:
            self.session.shouldstop = "its time is up"
