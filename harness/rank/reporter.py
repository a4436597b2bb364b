"""The rank's side of reporting: what pytest says of a test, sent to the controller phase by phase."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.reports import pytest_report_to_serializable

from harness.marker import is_xfail_call
from harness.output import MAX_MESSAGE, truncate
from harness.protocol import Reported, Warned
from harness.rank.output import TestOutput
from harness.rank.plain import plain
from harness.rank.raised import describe_raised
from harness.rank.xml_notes import XmlNotes

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
            self._rank.group.sever()

    def send(self, report: pytest.TestReport) -> None:
        """Send one report; at once if it tells of a failure, or of output that a death would take along."""
        data = self._serialise(report)
        if notes := self._xml.take():
            data["xml_notes"] = notes
        if _raised(report):
            ends_phase = type(report) is pytest.TestReport and report.when != "teardown"
            self._rank.send(Reported(plain(data), self._rank.collectives() if ends_phase else None))
        else:  # posted reports are lost if the process dies: no loss, unless there is something to show
            (self._rank.send if _printed(report) else self._rank.post)(Reported(plain(data)))

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
