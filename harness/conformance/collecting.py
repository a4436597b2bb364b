"""Two pytest plugins: one knows items where they run, one hears reports where the terminal is.

Without pytest-xdist both are in one process. With it the first is in each of its workers, and what it knows
travels with the first report of each.
"""

from __future__ import annotations

import inspect
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness.conformance.outcome import Outcome, Point, read_point
from harness.conformance.selection import claim_of, engine_of, engines_of
from harness.conformance.table import Cell, Claim, Run, Table
from harness.conformance.writing import write

_ASKED = "lockstep_asked"
"""The attribute of a report under which what was collected travels."""


def register(config: pytest.Config) -> None:
    """Let a run write its table to the directory that `--conformance` names.

    Raises:
        pytest.UsageError: nothing can be written there.
    """
    if config.option.collectonly:
        return
    knowing = Knowing(config)
    config.pluginmanager.register(knowing, "harness-conformance-knowing")
    if not hasattr(config, "workerinput"):
        directory = config.invocation_params.dir / config.getoption("conformance")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--conformance {directory}: {error.strerror}") from None
        config.pluginmanager.register(Hearing(config, directory, knowing), "harness-conformance")


@dataclass
class Asked:
    """What a process has collected."""

    items: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By node id: claim, engine, title."""
    deselected: list[str] = field(default_factory=list)


class Knowing:
    """Knows which claim and engine an item is about. In each process that runs items."""

    def __init__(self, config: pytest.Config) -> None:
        self.asked = Asked()
        self._travels = hasattr(config, "workerinput")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        about = [claim_of(item) for item in items if engine_of(item)]
        self.asked.deselected += [claim for claim in about if claim not in self.asked.deselected]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if engine := engine_of(item):
                self.asked.items[str(item.nodeid)] = (claim_of(item), engine, _title(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._travels:
            self._travels = False
            items = {nodeid: list(about) for nodeid, about in self.asked.items.items()}
            setattr(report, _ASKED, {"items": items, "deselected": self.asked.deselected})


class Hearing:
    """Hears every report, and writes the table when the run is over. In the process that has the terminal."""

    def __init__(self, config: pytest.Config, directory: Path, knowing: Knowing) -> None:
        self._config = config
        self._directory = directory
        self._asked = knowing.asked
        self._points: dict[str, list[Point]] = {}
        self._seconds: dict[str, float] = {}
        self._over: set[str] = set()
        self._began = time.monotonic()
        self._when = datetime.now(UTC).isoformat(timespec="seconds")
        self._interrupted = ""
        self._table: Table | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if told := getattr(report, _ASKED, None):
            self._hear_of_items(told)
        nodeid = str(report.nodeid)
        if point := read_point(report):
            self._points.setdefault(nodeid, []).append(point)
        if not hasattr(report, "context"):  # a subtest's time is part of its test's
            self._seconds[nodeid] = self._seconds.get(nodeid, 0.0) + report.duration
            if report.when == "teardown":
                self._over.add(nodeid)

    def _hear_of_items(self, told: dict[str, Any]) -> None:
        self._asked.items.update({nodeid: tuple(about) for nodeid, about in told["items"].items()})
        self._asked.deselected[:] = dict.fromkeys([*self._asked.deselected, *told["deselected"]])

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted = f"interrupted: {str(excinfo.value) or excinfo.typename}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        why = self._interrupted or str(session.shouldfail or session.shouldstop or "")
        if not why and not self._over.issuperset(self._asked.items):
            why = "internal error" if exitstatus == pytest.ExitCode.INTERNAL_ERROR else "interrupted"
        self._table = self._make_table(why or "complete")
        write(self._table, self._directory)

    def _make_table(self, ended: str) -> Table:
        table = Table(list(engines_of(self._config)))
        for nodeid, (claim, engine, title) in self._asked.items.items():
            table.claims.setdefault(claim, Claim(claim, title))
            points = self._points.get(nodeid, [])
            # A test that was interrupted has said nothing, but for what broke before.
            if nodeid in self._over or any(point.outcome == Outcome.BROKEN for point in points):
                cell = Cell(_without_the_frame(points), round(self._seconds.get(nodeid, 0.0), 4))
                table.cells.setdefault(claim, {})[engine] = cell
        left_out = [claim for claim in self._asked.deselected if claim not in table.claims]
        seconds = round(time.monotonic() - self._began, 1)
        arguments = tuple(map(str, self._config.invocation_params.args))
        table.runs.append(Run(self._when, seconds, arguments, _versions(), ended, tuple(left_out)))
        return table

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._table is None:
            return
        terminalreporter.section("conformance")
        for line in summary(self._table):
            terminalreporter.line(line)
        terminalreporter.line(f"written to {self._directory / 'conformance.html'}")


def summary(table: Table) -> list[str]:
    """Return a line for each engine."""
    if not table.claims:
        return ["no claim was asked of an engine"]
    width = max(len(engine) for engine in table.engines)
    claims = list(table.claims.values())
    lines = []
    for engine in table.engines:
        words = [f"{table.share(engine, claims)} points held", f"{table.claims_held(engine, claims)} claims"]
        for outcome in Outcome:
            number = sum(table.cell(claim, engine).outcome == outcome for claim in claims)
            if number and outcome != Outcome.HELD:
                words.append(f"{number} {outcome.value}")
        lines.append(f"{engine:<{width}}  {', '.join(words)}")
    return lines


def _without_the_frame(points: list[Point]) -> tuple[Point, ...]:
    """Leave out that a test passed as a whole where its subtests say it, or its tear-down says otherwise."""
    telling = (point for point in points if point.name or not point.outcome.holds)
    return tuple(telling) or tuple(points[:1])


def _title(item: pytest.Item) -> str:
    text = inspect.getdoc(getattr(item, "obj", None)) or ""
    return re.split(r"(?<=[.?])\s|\n\s*\n", text, maxsplit=1)[0].replace("\n", " ")


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "lockstep-harness", "pytest")}
