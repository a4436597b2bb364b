"""The table of a run: two pytest plugins, one where items are collected, one where reports arrive.

Without pytest-xdist both are in one process. With it the first is in each worker, and what it recorded
travels with the worker's first report. Controller; must not import torch.
"""

from __future__ import annotations

import inspect
import re
import time
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from lockstep.conformance.registry import claim_of, engine_of, engines_of
from lockstep.conformance.stored import write
from lockstep.conformance.table import Case, Cell, Claim, Outcome, SuiteRun, Table

_ATTRIBUTE = "lockstep_collected"
"""The attribute of a report under which what a worker collected travels."""

LONGEST_TEXT = 12_000
"""Characters of a failure's text that are kept; the middle of a longer one is left out."""

# The message of NotOffered, after the name of its class, which pytest may add.
_NOT_OFFERED = re.compile(r"(?:\S*NotOffered: )?\S+ does not offer: (?P<what>.+)", re.DOTALL)
_MENDED = re.compile(r"^\[XPASS\(strict\)\] (?P<reason>.*)", re.MULTILINE)
_ONLY_SUBTESTS = re.compile(r"contains \d+ failed subtests?")
_OF_WORKER = re.compile(r"\A\[gw\d+\] \S+ -- Python .*\n")
"""The line that pytest-xdist puts before a failure."""


def register(config: pytest.Config) -> None:
    """Make the run write its table to the directory that `--conformance` names.

    Raises:
        pytest.UsageError: nothing can be written there.
    """
    if config.option.collectonly:
        return
    items = ItemRecorder(config)
    config.pluginmanager.register(items, "harness-conformance-items")
    if not hasattr(config, "workerinput"):
        directory = config.invocation_params.dir / config.getoption("conformance")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--conformance {directory}: {error.strerror}") from None
        recorder = ReportRecorder(config, directory, items.collected)
        config.pluginmanager.register(recorder, "harness-conformance-reports")


@dataclass
class Collected:
    """The items of a process that are about an engine."""

    items: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Claim, engine and title of each item, by node id."""
    deselected: list[str] = field(default_factory=list)


class ItemRecorder:
    """Record the claim and the engine of each item. In every process that runs items."""

    def __init__(self, config: pytest.Config) -> None:
        self.collected = Collected()
        self._must_send = hasattr(config, "workerinput")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        claims = [claim_of(item) for item in items if engine_of(item)]
        self.collected.deselected += [claim for claim in claims if claim not in self.collected.deselected]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if engine := engine_of(item):
                if str(item.nodeid) in self.collected.items:  # by `--pyargs package.a package.b`
                    raise pytest.UsageError(
                        f"--conformance: two tests have the id {item.nodeid}: name a folder above both, or "
                        f"run `python -m lockstep conformance`"
                    )
                self.collected.items[str(item.nodeid)] = (claim_of(item), engine, _title(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._must_send:
            self._must_send = False
            items = {nodeid: list(about) for nodeid, about in self.collected.items.items()}
            setattr(report, _ATTRIBUTE, {"items": items, "deselected": self.collected.deselected})


class ReportRecorder:
    """Record every report, and write the table after the run. In the process that has the terminal."""

    def __init__(self, config: pytest.Config, directory: Path, collected: Collected) -> None:
        self._config = config
        self._directory = directory
        self._collected = collected
        self._cases: dict[str, list[Case]] = {}
        self._seconds: dict[str, float] = {}
        self._finished: set[str] = set()
        self._warned: set[tuple[str, str]] = set()
        self._start = time.monotonic()
        self._when = datetime.now(UTC).isoformat(timespec="seconds")
        self._interrupted = ""
        self._table: Table | None = None
        self._problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if sent := getattr(report, _ATTRIBUTE, None):
            self._merge(sent)
        nodeid = str(report.nodeid)
        if case := read_case(report):
            self._cases.setdefault(nodeid, []).append(case)
        if not hasattr(report, "context"):  # a subtest's time is part of its test's
            self._seconds[nodeid] = self._seconds.get(nodeid, 0.0) + report.duration
            if report.when == "teardown":
                self._finished.add(nodeid)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        text = str(warning_message.message).strip().partition("\n")[0]
        self._warned.add((nodeid, f"{warning_message.category.__name__}: {text}"))

    def _merge(self, sent: dict[str, Any]) -> None:
        self._collected.items.update({nodeid: tuple(about) for nodeid, about in sent["items"].items()})
        deselected = [*self._collected.deselected, *sent["deselected"]]
        self._collected.deselected[:] = dict.fromkeys(deselected)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted = f"interrupted: {str(excinfo.value) or excinfo.typename}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        why = self._interrupted or str(session.shouldfail or session.shouldstop or "")
        if not why and not self._finished.issuperset(self._collected.items):
            why = "internal error" if exitstatus == pytest.ExitCode.INTERNAL_ERROR else "interrupted"
        self._table = self._make_table(why or "complete")
        try:
            write(self._table, self._directory)
        except OSError as error:
            self._problem = f"{error.filename or self._directory}: {error.strerror}"
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def _make_table(self, ended: str) -> Table:
        table = Table(list(engines_of(self._config)))
        for nodeid, (claim, engine, title) in self._collected.items.items():
            table.claims.setdefault(claim, Claim(claim, title))
            cases = self._cases.get(nodeid, [])
            # Of a test that was interrupted only what failed before is certain.
            if nodeid in self._finished or any(case.outcome == Outcome.BROKEN for case in cases):
                cell = Cell(_without_the_frame(cases), round(self._seconds.get(nodeid, 0.0), 4))
                table.cells.setdefault(claim, {})[engine] = cell
        for nodeid, text in sorted(self._warned):
            if nodeid in self._collected.items:
                engine = self._collected.items[nodeid][1]
                counted = table.warnings.setdefault(engine, {})
                counted[text] = counted.get(text, 0) + 1
        left_out = [claim for claim in self._collected.deselected if claim not in table.claims]
        seconds = round(time.monotonic() - self._start, 1)
        arguments = tuple(map(str, self._config.invocation_params.args))
        versions = {name: version(name) for name in ("torch", "lockstep-harness", "pytest")}
        table.runs.append(SuiteRun(self._when, seconds, arguments, versions, ended, tuple(left_out)))
        return table

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._table is None:
            return
        terminalreporter.section("conformance")
        for line in summary(self._table):
            terminalreporter.line(line)
        page = f"written to {self._directory / 'conformance.html'}"
        terminalreporter.line(f"no file is written: {self._problem}" if self._problem else page)


def summary(table: Table) -> list[str]:
    """Return a line for each engine."""
    if not table.claims:
        return ["no test of an engine was run"]
    width = max(map(len, table.engines), default=0)
    claims = list(table.claims.values())
    lines = []
    for engine in table.engines:
        words = [f"{table.share(engine, claims)} cases held", f"{table.claims_held(engine, claims)} claims"]
        for outcome in Outcome:
            number = sum(table.cell(claim, engine).outcome == outcome for claim in claims)
            if number and outcome != Outcome.HELD:
                words.append(f"{number} {outcome.value}")
        lines.append(f"{engine:<{width}}  {', '.join(words)}")
    return lines


def _without_the_frame(cases: list[Case]) -> tuple[Case, ...]:
    """Drop the pass of the test itself where subtests passed too, or its tear-down did not."""
    needed = (case for case in cases if case.name or not case.outcome.holds)
    return tuple(needed) or tuple(cases[:1])


def _title(item: pytest.Item) -> str:
    """Return the first sentence of the test's docstring."""
    text = (inspect.getdoc(item.obj) if hasattr(item, "obj") else None) or ""
    return re.split(r"(?<=[.?])\s|\n\s*\n", text, maxsplit=1)[0].replace("\n", " ")


def read_case(report: pytest.TestReport) -> Case | None:
    """Return the case that a report is about; None if it adds nothing to other reports of the test."""
    name = _name_of(report)
    if hasattr(report, "wasxfail") and report.skipped:
        reason = report.wasxfail.removeprefix("reason: ").replace("[NOTRUN]", "not tried:")
        return Case(name, Outcome.DEVIATION, reason)
    if report.skipped:
        return _skipped(name, report)
    if report.failed:
        text = _OF_WORKER.sub("", report.longreprtext)
        if mended := _MENDED.search(text):
            return Case(name, Outcome.MENDED, mended["reason"])
        return None if not name and _ONLY_SUBTESTS.fullmatch(text) else _broken(name, report, text)
    return Case(name, Outcome.HELD) if report.when == "call" else None


def _name_of(report: pytest.TestReport) -> str:
    context = getattr(report, "context", None)  # of a subtest
    if context is None:
        return ""
    settings = ", ".join(f"{key}={value}" for key, value in context.kwargs.items())
    return " ".join(filter(None, (context.msg, settings))) or "a subtest"


def _skipped(name: str, report: pytest.TestReport) -> Case:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    reason = text.removeprefix("Skipped: ")
    if found := _NOT_OFFERED.fullmatch(reason):
        return Case(name, Outcome.NOT_OFFERED, found["what"])
    return Case(name, Outcome.SKIPPED, reason)


def _broken(name: str, report: pytest.TestReport, text: str) -> Case:
    when = "" if report.when == "call" else f"in {report.when}\n"
    text = when + text
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return Case(name, Outcome.BROKEN, text=text)
