"""The rank's side of reporting: what pytest says of a test, sent to the controller phase by phase."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from _pytest._code.code import filter_traceback
from _pytest.junitxml import bin_xml_escape, xml_key
from _pytest.reports import pytest_report_to_serializable

from harness.marker import is_xfail_call
from harness.output import MAX_MESSAGE, truncate, truncate_lines
from harness.protocol import Reported, Warned
from harness.rank.output import TestOutput

if TYPE_CHECKING:
    from harness.rank.process import Rank

PHASES = ("setup", "call", "teardown")

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback


class RankReporter:
    """Sends reports and warnings. A plugin of the rank's pytest session.

    Attributes:
        phases_over: How many phases of the item in hand have been reported.
    """

    def __init__(self, rank: Rank) -> None:
        self.phases_over = 0
        self._rank = rank
        self._xml = XmlNotes()
        self._output = TestOutput(rank.spec.rank, rank.spec.session.output_directory)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        self._xml.attach(config)

    def begin(self, item: pytest.Item) -> None:
        """Note that the reports of this item follow."""
        self.phases_over = 0
        self._output.begin(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        self._output.settle(item)

    @pytest.hookimpl(trylast=True)  # what a hook of the user's raises here belongs to the same phase
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_of_subtest = type(report) is not pytest.TestReport
        if is_of_subtest:
            self._output.settle_subtest(report)
        self.send(report)
        if is_of_subtest:
            return  # the test goes on
        self.phases_over = PHASES.index(report.when) + 1
        self._rank.note_phases_over(self.phases_over)
        if report.when != "teardown" and _raised(report):
            self._rank.group.abort()

    def send(self, report: pytest.TestReport) -> None:
        """Send one report; at once if it tells of a failure, or of output that a death would take along."""
        data = self._serialise(report)
        if notes := self._xml.take():
            data["xml_notes"] = notes
        if _raised(report):
            ends_phase = type(report) is pytest.TestReport and report.when != "teardown"
            self._rank.send(Reported(sanitise(data), self._rank.collectives() if ends_phase else None))
        else:  # posted reports are lost if the process dies: no loss, unless there is something to show
            (self._rank.send if _printed(report) else self._rank.post)(Reported(sanitise(data)))

    def _serialise(self, report: pytest.TestReport) -> dict[str, Any]:
        """Return pytest's serialised form of a report, or that of a failure that says why there is none."""
        why = f"a {type(report).__name__} cannot be sent to the controller: no plugin serialises it"
        data: dict[str, Any] | None
        try:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        except BaseException as error:  # of a hook of the user's, which would end the rank
            data = None
            why = f"a report cannot be sent to the controller: a hook raised\n{describe_raised(error)}"
        if data is None:
            data = pytest_report_to_serializable(failure(report.nodeid, report.location, why, report.when))
        assert data is not None
        return data

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._output.keep_of_file(report)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # those of start and collection are the controller's too
            category = warning_message.category
            text, filename = truncate(str(warning_message.message), MAX_MESSAGE), warning_message.filename
            self._rank.post(
                Warned(category.__module__, category.__qualname__, text, filename, warning_message.lineno)
            )


def _raised(report: pytest.TestReport) -> bool:
    """Whether something was raised, expected or not, that is no skip and no `pytest.xfail()`."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail") and not is_xfail_call(report))


def _printed(report: pytest.TestReport) -> bool:
    """Whether the phase has captured output, and another phase will follow."""
    return report.when != "teardown" and any(title.endswith(report.when) for title, _ in report.sections)


def failure(nodeid: str, location: tuple[str, int | None, str], why: Any, when: Any) -> pytest.TestReport:
    """Make the report of a phase that failed without pytest's doing."""
    return pytest.TestReport(nodeid, location, {}, "failed", why, when)


class XmlNotes:
    """Takes what the fixtures `record_testsuite_property` and `record_xml_attribute` record."""

    family = "xunit1"  # of any other one pytest's fixtures say, on every rank, that it has no place for them

    def __init__(self) -> None:
        self._notes: list[tuple[str, str, str]] = []

    def attach(self, config: pytest.Config) -> None:
        """Take the place of the report in a session. pytest takes both away when the session ends."""
        config.stash[cast("pytest.StashKey[object]", xml_key)] = self
        config.pluginmanager.register(self, "harness-xml-notes")

    def take(self) -> list[tuple[str, str, str]]:
        """Return what was noted since the last time: "property" or "attribute", name, value."""
        notes, self._notes = self._notes, []
        return notes

    def add_global_property(self, name: str, value: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name parameter needs to be a string, but {type(name).__name__} given")
        self._notes.append(("property", bin_xml_escape(name), str(value)))

    def node_reporter(self, nodeid: object) -> XmlNotes:
        return self  # one test at a time runs in a rank

    def add_attribute(self, name: str, value: object) -> None:
        self._notes.append(("attribute", str(name), str(value)))


_AS_THEY_ARE = frozenset({bool, int, float, type(None)})
_CRASH = {"path", "lineno", "message"}


def sanitise(value: Any) -> Any:
    """Reduce a value to what can be sent and reads the same without the rank's modules: a tensor to its text.

    Reports hold anything: recorded properties, and what users' hooks set as attributes. What is too long to
    be read is cut.
    """
    kind = type(value)  # most values are simple, and this runs for each of every report
    if kind is str:
        return truncate(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        return _sanitise_dict(value)
    if isinstance(value, list | tuple):
        return _sanitise_list(value)
    return truncate(str(value))


def _sanitise_dict(value: dict[Any, Any]) -> dict[str, Any]:
    found = {str(name): sanitise(item) for name, item in value.items()}
    if found.keys() == _CRASH:
        found["message"] = truncate(str(found["message"]), MAX_MESSAGE)
    return found


def _sanitise_list(value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(map(sanitise, value))
    if value and all(type(item) is str for item in value):
        return truncate_lines([truncate(line, MAX_MESSAGE) for line in value])
    return list(map(sanitise, value))


_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen")


def describe_raised(error: BaseException) -> str:
    """Return a traceback as pytest shows those of collection, without its own frames and ours."""
    if isinstance(error, pytest.UsageError):
        return str(error)
    excinfo = pytest.ExceptionInfo.from_exception(error)
    excinfo.traceback = excinfo.traceback.filter(
        lambda entry: filter_traceback(entry) and not str(entry.path).startswith(_NOT_THE_USERS)
    )
    return str(excinfo.getrepr(style="short") if excinfo.traceback else excinfo.exconly())
