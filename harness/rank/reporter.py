"""Reports of a rank: what pytest reports of a test, sent to the controller phase by phase."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.output import MAX_MESSAGE, MAX_TEXT, truncate, truncate_lines
from lockstep.protocol import REPORT_PARTS, Reported, Warned
from lockstep.pytest_internals import is_xfail_call
from lockstep.rank.output import TestOutput
from lockstep.rank.pytest_internals import is_of_user, serialise_report
from lockstep.rank.torch_internals import is_for_want_of_a_group

if TYPE_CHECKING:
    from lockstep.rank.item import ItemGuards
    from lockstep.rank.process import Rank
    from lockstep.standing import Standing

PHASES = ("setup", "call", "teardown")

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback


class RankReporter:
    """Sends reports and warnings. A plugin of the rank's pytest session.

    Attributes:
        phases_over: How many phases of the current item have been reported.
    """

    def __init__(self, rank: Rank, standing: Standing, guards: ItemGuards) -> None:
        self.phases_over = 0
        self._rank = rank
        self._standing = standing
        self._guards = guards
        self._raised: BaseException | None = None
        self._output = TestOutput(rank.world, rank.spec.session.output_directory)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def begin(self, item: pytest.Item) -> None:
        """Expect the reports of this item."""
        self.phases_over = 0
        self._item = item
        self._output.begin(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        self._raised = error = call.excinfo and call.excinfo.value
        if error is not None and self._rank.group.ended.note and is_for_want_of_a_group(error):
            error.add_note(self._rank.group.ended.note)
        self._rank.forks.end_child(self._raised)  # of a subtest, above all
        self._output.settle(item)

    @pytest.hookimpl(trylast=True)  # what a hook of the user's raises here belongs to the same phase
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_of_subtest = type(report) is not pytest.TestReport
        if is_of_subtest:
            self._output.settle_subtest(report)
        self._guards.raised |= report.failed or hasattr(report, "wasxfail")
        self.send(report)
        if is_of_subtest:
            return  # the test goes on
        self.phases_over = PHASES.index(report.when) + 1
        self._standing.record_phases_over(self.phases_over)
        if report.when != "teardown" and _raised(report):
            self._rank.group.abort()

    def send(self, report: pytest.TestReport) -> None:
        """Send one report, at once if it is of a failure or has output that a death would lose."""
        data = self._serialise(report)
        error, self._raised = self._raised, None
        if report.failed and error is not None:
            parts = data.setdefault(REPORT_PARTS, {})
            self._config.hook.pytest_ranks_failed(item=self._item, report=report, error=error, parts=parts)
        if _raised(report):
            is_of_subtest = type(report) is not pytest.TestReport
            ends_part = report.failed if is_of_subtest else report.when != "teardown"
            self._rank.wire.send(
                Reported(sanitise(data), self._rank.status.collectives() if ends_part else None)
            )
        else:  # posted reports are lost if the process dies: no loss, unless there is something to show
            has_output = any(title.endswith(report.when) for title, _ in report.sections)
            send = self._rank.wire.send if has_output and report.when != "teardown" else self._rank.wire.post
            send(Reported(sanitise(data)))

    def _serialise(self, report: pytest.TestReport) -> dict[str, Any]:
        """Return pytest's serialised form of a report, or of a failure with the reason why there is none."""
        why = f"a {type(report).__name__} cannot be sent to the controller: no plugin serialises it"
        data: dict[str, Any] | None
        try:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        except BaseException as error:  # of a hook of the user's, which would end the rank
            data = None
            why = f"a report cannot be sent to the controller: a hook raised\n{describe_raised(error)}"
        if data is None:
            data = serialise_report(failure(report.nodeid, report.location, why, report.when))
        assert data is not None
        return data

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._output.keep_of_file(report)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # those of start and collection are the controller's too
            category = warning_message.category
            text, filename = truncate(str(warning_message.message), MAX_MESSAGE), warning_message.filename
            self._rank.wire.post(
                Warned(category.__module__, category.__qualname__, text, filename, warning_message.lineno)
            )


def _raised(report: pytest.TestReport) -> bool:
    """Whether something was raised, expected or not, that is no skip and no `pytest.xfail()`."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail") and not is_xfail_call(report))


def failure(nodeid: str, location: tuple[str, int | None, str], why: Any, when: Any) -> pytest.TestReport:
    """Return the report of a phase that failed outside of pytest."""
    return pytest.TestReport(nodeid, location, {}, "failed", why, when)


_AS_THEY_ARE = frozenset({bool, int, float, type(None)})
_CRASH = {"path", "lineno", "message"}


def sanitise(value: Any) -> Any:
    """Return a form of a value that can be sent, and needs no modules of the rank: a tensor becomes its text.

    Reports hold anything: recorded properties, and what users' hooks set as attributes. What is too long to
    be read is truncated.
    """
    kind = type(value)  # most values are simple, and this runs for each of every report
    if kind is str:
        return value if len(value) <= MAX_TEXT else truncate(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        found = {str(name): sanitise(item) for name, item in value.items()}
        if found.keys() == _CRASH:
            found["message"] = truncate(str(found["message"]), MAX_MESSAGE)
        return found
    if isinstance(value, tuple):
        return tuple(map(sanitise, value))
    if kind in (set, frozenset):
        return kind(map(sanitise, value))  # the lines that pytest-testmon has measured
    if isinstance(value, list):
        if value and all(type(item) is str for item in value):
            return truncate_lines([truncate(line, MAX_MESSAGE) for line in value])
        return list(map(sanitise, value))
    return truncate(str(value))


_NOT_OF_USER = (str(Path(__file__).parent), "<frozen")


def describe_raised(error: BaseException) -> str:
    """Return a traceback as pytest shows those of collection, without its own frames and ours."""
    if isinstance(error, pytest.UsageError):
        return str(error)
    excinfo = pytest.ExceptionInfo.from_exception(error)
    excinfo.traceback = excinfo.traceback.filter(
        lambda entry: is_of_user(entry) and not str(entry.path).startswith(_NOT_OF_USER)
    )
    return str(excinfo.getrepr(style="short") if excinfo.traceback else excinfo.exconly())
