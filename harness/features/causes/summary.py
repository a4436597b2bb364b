"""The end of a run's report: failures grouped by their cause.

Runs in the controller, and in the main process of pytest-xdist; must not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from lockstep.features.causes.causes import Ran, cause_of, is_foreign, narrow
from lockstep.reporting.pytest_internals import crash_of

MOST_CAUSES = 10
"""Causes that are shown unless all are asked for."""
_EVERYWHERE = {"ranks", "parametrize", "usefixtures", "filterwarnings"}
"""Marks that say how a test runs, and not which one it is."""
_ONLY_SUBTESTS = re.compile(r"contains \d+ failed subtests?")
_OF_WORKER = re.compile(r"\A\[gw\d+\] \S+ -- Python .*\n")
"""The line that pytest-xdist puts before a failure."""


@dataclass
class Cause:
    """Failures that have one cause, in the order in which they came."""

    where: str
    what: str
    failed: list[Failed] = field(default_factory=list)
    rerun: str = ""
    """The command that runs the first of them again."""
    options: tuple[str, ...] = ()
    """Options of that command besides the test and its case."""


@dataclass(frozen=True)
class Failed:
    """A failed test or subtest, and how a command names it.

    Attributes:
        target: a path from where pytest was started, or a module of `--pyargs`, then its names, which have
            no parameter for the engine.
    """

    ran: Ran
    target: str
    is_module: bool

    @property
    def selectable(self) -> Ran:
        """The test, with the parameters that the command has."""
        own, bracket, parameters = self.ran.nodeid.partition("[")
        if bracket:
            bracket, parameters = self.target.partition("[")[1:]
        return replace(self.ran, nodeid=f"{own}{bracket}{parameters}")

    def command_of(self, path: str) -> list[str]:
        """Return the words that select what is at or below the path, which leads to this node id."""
        file, _, names = path.partition("::")
        place = self.target.partition("::")[0]
        up = _depth(self.ran.nodeid.partition("::")[0]) - _depth(file)
        if self.is_module:
            parts = place.split(".")
            place = ".".join(parts[: len(parts) - up])
        else:
            place = os.path.normpath(os.path.join(place, *[".."] * up))
            if place == ".":
                return []
        return [*(["--pyargs"] if self.is_module else []), f"{place}::{names}" if names else place]


class Summary:
    """Lists the causes of failures at the end of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        names = (str(line).partition(":")[0].partition("(")[0].strip() for line in config.getini("markers"))
        self._marks = frozenset(names) - _EVERYWHERE

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # last: below the list of all that failed
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, object, object]:
        result = yield
        stats = terminalreporter.stats
        wanted = self._config.getoption("ranks_causes")
        if wanted == "no" or self._config.option.verbose < -1:
            return result
        failed = [report for kind in ("failed", "error") for report in stats.get(kind, ())]
        reports = [
            report for report in failed if isinstance(report, pytest.TestReport) and not _is_sum(report)
        ]
        causes = self._group(reports)
        if wanted == "all" or len(causes) < len(reports):
            ran = list(self._ran(report for found in stats.values() for report in found))
            for line in lines(causes, ran, None if wanted == "all" else MOST_CAUSES):
                terminalreporter.write_line(line)
        return result

    def _group(self, reports: list[pytest.TestReport]) -> list[Cause]:
        found: dict[tuple[str, str], Cause] = {}
        for report in reports:
            key = self._cause_of(report)
            cause = found.setdefault(key, Cause(*key))
            rerun = _rerun(report, self._from_here(str(report.nodeid)))
            is_module, target, *_ = _selection(rerun)
            cause.failed.append(Failed(self._as_ran(report), target, is_module))
            if not cause.rerun:
                cause.rerun = rerun
                cause.options = _options(rerun, self._config.getoption("subtest"))
        return sorted(found.values(), key=lambda cause: -len(cause.failed))

    def _cause_of(self, report: pytest.TestReport) -> tuple[str, str]:
        where, what = cause_of(_OF_WORKER.sub("", report.longreprtext))
        crash = crash_of(report)
        if not where and crash and not is_foreign(crash):  # under --tb=no and --tb=line
            where = crash.removeprefix(f"{self._config.invocation_params.dir}/")
        return where, what if report.when == "call" else f"{what} (in {report.when})"

    def _as_ran(self, report: pytest.TestReport) -> Ran:
        context = getattr(report, "context", None)
        case = (context.msg or "") if context is not None else ""
        return Ran(str(report.nodeid), case, self._marks.intersection(report.keywords))

    def _from_here(self, nodeid: str) -> str:
        """Return a node id of the rootdir as one of the directory where pytest was started."""
        file, *names = nodeid.split("::")
        path = os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir)
        return "::".join((path, *names))

    def _ran(self, reports: Iterable[object]) -> Iterator[Ran]:
        """Yield each test and subtest that has run, once."""
        tests = [report for report in reports if isinstance(report, pytest.TestReport)]
        with_cases = {str(report.nodeid) for report in tests if hasattr(report, "context")}
        seen = set()
        for report in tests:
            ran = self._as_ran(report)
            if ran not in seen and (ran.case or ran.nodeid not in with_cases):
                seen.add(ran)
                yield ran


def lines(causes: list[Cause], ran: list[Ran], most: int | None) -> Iterator[str]:
    """Yield the lines of the summary: how many causes there are, and three lines for each."""
    total = sum(len(cause.failed) for cause in causes)
    yield ""
    yield f"{_counted(total, 'failure')}, {_counted(len(causes), 'cause')}:"
    for cause in causes[:most]:
        where = f" at {cause.where}" if cause.where else ""
        yield f"{len(cause.failed):>5}{where}: {cause.what}"
        yield f"      one of them: {cause.rerun}"
        if len(cause.failed) > 1:
            narrowed = narrow([each.selectable for each in cause.failed], ran)
            first, *rest = [each.command_of(narrowed.path) for each in cause.failed]
            words = [*first, *narrowed.selecting]
            if not words or any(each != first for each in rest):
                continue
            others = narrowed.num_selected - len(cause.failed)
            more = f" (and {others:,} more)" if others > 0 else ""
            command = shlex.split(cause.rerun)
            command = command[: command.index("--") + 1 if "--" in command else 1]
            yield f"      all of them: {shlex.join([*command, *words, *cause.options])}{more}"
    if most is not None and len(causes) > most:
        yield f"      and {_counted(len(causes) - most, 'cause')} more: --causes=all"


def _is_sum(report: pytest.TestReport) -> bool:
    """Return whether a test failed only because subtests of it have."""
    return _ONLY_SUBTESTS.fullmatch(_OF_WORKER.sub("", report.longreprtext)) is not None


def _rerun(report: pytest.TestReport, nodeid: str) -> str:
    properties = dict(pair for pair in report.user_properties if isinstance(pair[0], str))
    return str(properties.get("rerun") or shlex.join(["pytest", nodeid]))


def _selection(rerun: str) -> tuple[bool, str, list[str]]:
    """Return whether a command names a module, what it selects, and its other words."""
    _, *words = shlex.split(rerun)
    words = words[words.index("--") + 1 :] if "--" in words else words  # of the command that runs pytest
    is_module = words[0] == "--pyargs"
    return is_module, words[is_module], words[is_module + 1 :]


def _depth(path: str) -> int:
    return len(path.split("/")) if path else 0


def _options(rerun: str, subtests: list[str]) -> tuple[str, ...]:
    """Return the options of a command; of `--subtest` those that the user has given to the whole run."""
    _, _, words = _selection(rerun)
    while "--subtest" in words:
        place = words.index("--subtest")
        del words[place : place + 2]
    return (*words, *(word for each in subtests for word in ("--subtest", each)))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
