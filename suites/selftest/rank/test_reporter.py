"""Values of reports that are made ready to be sent, and errors outside of tests in words."""

from __future__ import annotations

import os
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from lockstep.output import MAX_MESSAGE, MAX_TEXT
from lockstep.protocol import REPORT_PARTS, Reported, Warned
from lockstep.rank import reporter as module
from lockstep.rank.reporter import RankReporter, describe_raised, failure, sanitise


class Words(str):
    """A text of a class that the controller may not have."""


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("text", "text"),
        (None, None),
        (True, True),
        (1.5, 1.5),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        (Words("of a class"), "of a class"),
        ({1: torch.tensor(3)}, {"1": "tensor(3)"}),
        (OrderedDict(a=(torch.tensor(3), 1)), {"a": ("tensor(3)", 1)}),
        ({3, 4}, {3, 4}),
        (frozenset({"a"}), frozenset({"a"})),
        (["a", "b"], ["a", "b"]),
        ([torch.tensor(3), 1], ["tensor(3)", 1]),
        (["a", 1], ["a", 1]),
        ([], []),
    ],
)
def test_a_value_is_sent_as_what_needs_no_modules(value: object, sent: object) -> None:
    found = sanitise(value)
    assert found == sent
    assert type(found) is type(sent)


def test_what_is_too_long_to_be_read_is_truncated() -> None:
    long = "x" * (MAX_TEXT + 1)
    assert sanitise("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert len(sanitise(long)) <= MAX_TEXT
    assert len(sanitise(Words(long))) <= MAX_TEXT
    crash = {"path": "a.py", "lineno": 1, "message": "x" * (MAX_MESSAGE + 1)}
    assert {**crash, "message": ""} == {**(found := sanitise(crash)), "message": ""}
    assert len(found["message"]) <= MAX_MESSAGE
    other = {"message": "x" * (MAX_MESSAGE + 1)}
    assert sanitise(other) == other
    assert all(len(line) <= MAX_MESSAGE for line in sanitise(["x" * (MAX_MESSAGE + 1), "y"]))


def test_an_error_outside_of_tests_has_the_frames_of_the_user() -> None:
    try:
        os.stat("/nowhere")
    except OSError as error:
        lines = describe_raised(error).splitlines()
    assert lines[0].startswith(f"{os.path.relpath(__file__)}:") or __file__ in lines[0]
    assert lines[1:] == [
        '    os.stat("/nowhere")',
        "E   FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'",
    ]


def test_errors_of_usage_and_of_no_frame_are_their_words() -> None:
    assert describe_raised(pytest.UsageError("write a number")) == "write a number"
    with pytest.raises(ValueError) as raised:
        pytest.approx(1.0, abs=-1.0) == 2.0  # noqa: B015
    error = raised.value.with_traceback(raised.tb.tb_next)
    assert describe_raised(error) == f"ValueError: {error}"


# What is sent of a test

FEATURE = {"of": "a feature"}


def serialise(config: object, report: Any) -> dict[str, Any] | None:
    return {"when": report.when, "outcome": report.outcome}


class Reporting:
    """A reporter, and the calls of what it has been given, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mock = mock = Mock()
        self.item = SimpleNamespace(nodeid="test_a.py::test_a")
        monkeypatch.setattr(module, "TestOutput", self.make_output)
        mock.group.ended.note = ""
        mock.status.collectives.return_value = "the collectives"
        self.output = mock.output
        self.rank = SimpleNamespace(
            group=mock.group,
            forks=mock.forks,
            wire=mock.wire,
            status=mock.status,
            world="the world",
            spec=SimpleNamespace(session=SimpleNamespace(output_directory="/outputs")),
        )
        self.guards = SimpleNamespace(raised=False)
        self.reporter = RankReporter(self.rank, mock.standing, self.guards)  # type: ignore[arg-type]
        self.phases_before = self.reporter.phases_over
        config: Any = SimpleNamespace(hook=mock.hook)
        mock.hook.pytest_report_to_serializable.side_effect = serialise
        self.reporter.pytest_configure(config)
        self.reporter.phases_over = 3
        self.reporter.begin(self.item)  # type: ignore[arg-type]
        assert mock.mock_calls == [call.output.begin(self.item)]
        mock.reset_mock()

    def make_output(self, world: object, directory: str) -> Mock:
        assert (world, directory) == ("the world", "/outputs")
        made: Mock = self.mock.output
        return made

    def report(self, report: Any) -> list[Any]:
        """Log a report; return what was called for it, without its serialisation."""
        self.mock.reset_mock()
        self.reporter.pytest_runtest_logreport(report)
        calls = self.mock.mock_calls
        return [each for each in calls if each[0] not in ("hook.pytest_report_to_serializable",)]

    def raise_in_phase(self, error: BaseException | None) -> None:
        excinfo = None if error is None else SimpleNamespace(value=error)
        self.reporter.pytest_runtest_makereport(self.item, SimpleNamespace(excinfo=excinfo))  # type: ignore[arg-type]


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Reporting:
    return Reporting(monkeypatch)


def report_of(
    when: str = "call", outcome: Any = "passed", sections: Any = (), **more: Any
) -> pytest.TestReport:
    phase: Any = when
    location = ("test_a.py", 3, "test_a")
    return pytest.TestReport("test_a.py::test_a", location, {}, outcome, None, phase, sections, **more)


class SubtestReport(pytest.TestReport):
    """A report of a subtest, which does not end a phase."""


def subtest_of(outcome: Any) -> pytest.TestReport:
    return SubtestReport("test_a.py::test_a", ("test_a.py", 3, "test_a"), {}, outcome, None, "call")


def sent_of(when: str, outcome: str, *collectives: str | None) -> Reported:
    status: Any = collectives
    return Reported({"when": when, "outcome": outcome}, *status)


def test_a_report_that_passed_is_posted_and_ends_its_phase(reporting: Reporting) -> None:
    assert reporting.phases_before == 0
    assert reporting.reporter.phases_over == 0
    for over, when in enumerate(("setup", "call", "teardown"), 1):
        expected = [call.wire.post(sent_of(when, "passed")), call.standing.record_phases_over(over)]
        assert reporting.report(report_of(when)) == expected
        assert reporting.reporter.phases_over == over
    assert reporting.guards.raised is False


@pytest.mark.parametrize(
    ("when", "title", "way"),
    [
        ("call", "Captured stdout call", "send"),
        ("setup", "Captured log setup", "send"),
        ("call", "Captured stdout setup", "post"),
        ("teardown", "Captured stdout teardown", "post"),
    ],
)
def test_a_report_with_output_of_its_phase_is_sent_at_once(
    reporting: Reporting, when: str, title: str, way: str
) -> None:
    first, _ = reporting.report(report_of(when, sections=[("Captured err before", ""), (title, "text")]))
    assert first == getattr(call.wire, way)(sent_of(when, "passed"))


def test_a_failure_is_sent_with_collectives_and_aborts_the_group(reporting: Reporting) -> None:
    for when in ("setup", "call"):
        reporting.guards.raised = False
        assert reporting.report(report_of(when, "failed")) == [
            call.status.collectives(),
            call.wire.send(sent_of(when, "failed", "the collectives")),
            call.standing.record_phases_over(1 if when == "setup" else 2),
            call.group.abort(),
        ]
        assert reporting.guards.raised is True
    assert reporting.report(report_of("teardown", "failed")) == [
        call.wire.send(sent_of("teardown", "failed", None)),
        call.standing.record_phases_over(3),
    ]


def test_what_raised_as_expected_counts_as_raised(
    reporting: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = reporting.report(report_of(outcome="skipped", wasxfail="reason"))
    assert call.wire.send(sent_of("call", "skipped", "the collectives")) in calls
    assert calls[-1] == call.group.abort()
    assert reporting.guards.raised is True
    reporting.guards.raised = False
    posted = call.wire.post(sent_of("call", "skipped"))
    assert reporting.report(report_of(outcome="skipped"))[0] == posted
    assert reporting.guards.raised is False
    assert reporting.report(report_of(wasxfail="reason"))[0] == call.wire.post(sent_of("call", "passed"))
    assert reporting.guards.raised is True
    monkeypatch.setattr(module, "is_xfail_call", lambda report: True)
    calls = reporting.report(report_of(outcome="skipped", wasxfail="reason"))
    assert calls == [posted, call.standing.record_phases_over(2)]


def test_a_subtest_ends_no_phase(reporting: Reporting) -> None:
    report = subtest_of("failed")
    assert reporting.report(report) == [
        call.output.settle_subtest(report),
        call.status.collectives(),
        call.wire.send(sent_of("call", "failed", "the collectives")),
    ]
    assert reporting.guards.raised is True
    assert reporting.reporter.phases_over == 0
    report = subtest_of("skipped")
    report.wasxfail = "reason"  # type: ignore[attr-defined]
    assert reporting.report(report) == [
        call.output.settle_subtest(report),
        call.wire.send(sent_of("call", "skipped", None)),
    ]


def test_features_add_parts_to_the_report_of_an_error_once(reporting: Reporting) -> None:
    def add(*, item: object, report: pytest.TestReport, error: object, parts: dict[str, Any]) -> None:
        seen.append((item, report.when, error))
        parts["mine"] = FEATURE

    seen: list[tuple[object, ...]] = []
    reporting.mock.hook.pytest_ranks_failed.side_effect = add
    error = ValueError("bad")
    reporting.raise_in_phase(error)
    calls = reporting.report(report_of(outcome="failed"))
    data = {"when": "call", "outcome": "failed", REPORT_PARTS: {"mine": FEATURE}}
    assert call.wire.send(Reported(data, "the collectives")) in calls  # type: ignore[arg-type]
    assert seen == [(reporting.item, "call", error)]
    reporting.report(report_of("teardown", "failed"))
    reporting.raise_in_phase(error)
    reporting.report(report_of())
    reporting.report(report_of("teardown", "failed"))
    reporting.raise_in_phase(error)
    reporting.raise_in_phase(None)
    reporting.report(report_of(outcome="failed"))
    assert len(seen) == 1


def test_before_a_report_children_end_and_output_is_settled(reporting: Reporting) -> None:
    error = ValueError("bad")
    reporting.raise_in_phase(error)
    reporting.raise_in_phase(None)
    settle = call.output.settle(reporting.item)
    expected = [call.forks.end_child(error), settle, call.forks.end_child(None), settle]
    assert reporting.mock.mock_calls == expected


@pytest.mark.parametrize(("note", "is_for_want"), [("note", True), ("note", False), ("", True)])
def test_an_error_for_want_of_a_group_has_a_note(
    reporting: Reporting, monkeypatch: pytest.MonkeyPatch, note: str, is_for_want: bool
) -> None:
    errors: list[BaseException] = []
    monkeypatch.setattr(module, "is_for_want_of_a_group", lambda error: errors.append(error) or is_for_want)
    reporting.mock.group.ended.note = note
    error = ValueError("bad")
    reporting.raise_in_phase(error)
    assert getattr(error, "__notes__", []) == (["note"] if note and is_for_want else [])
    reporting.raise_in_phase(None)
    assert errors == ([error] if note else [])


def test_what_is_sent_needs_no_modules(reporting: Reporting) -> None:
    reporting.mock.hook.pytest_report_to_serializable.side_effect = lambda **_: {"found": torch.tensor(1)}
    assert reporting.report(report_of())[0] == call.wire.post(Reported({"found": "tensor(1)"}))
    sent = call.wire.send(Reported({"found": "tensor(1)"}, None))
    assert reporting.report(report_of("teardown", "failed"))[0] == sent


def test_a_report_that_cannot_be_sent_is_a_failure_that_says_why(reporting: Reporting) -> None:
    hook = reporting.mock.hook.pytest_report_to_serializable
    hook.side_effect = lambda **_: None
    report = subtest_of("passed")
    data = reporting.reporter._serialise(report)
    assert (data["nodeid"], data["outcome"], data["when"]) == (report.nodeid, "failed", "call")
    assert tuple(data["location"]) == report.location
    why = "a SubtestReport cannot be sent to the controller: no plugin serialises it"
    assert data["longrepr"] == why
    hook.side_effect = KeyboardInterrupt("of a hook")
    data = reporting.reporter._serialise(report)
    first, *_, last = data["longrepr"].splitlines()
    assert first == "a report cannot be sent to the controller: a hook raised"
    assert last.endswith("KeyboardInterrupt: of a hook")
    hook.side_effect = serialise
    assert reporting.reporter._serialise(report) == {"when": "call", "outcome": "passed"}
    assert hook.call_args.kwargs == {"config": reporting.reporter._config, "report": report}


def test_a_failure_outside_of_pytest_is_a_report() -> None:
    report = failure("a.py::test_b", ("a.py", 3, "test_b"), "the reason", "setup")
    assert (report.nodeid, report.location, report.keywords) == ("a.py::test_b", ("a.py", 3, "test_b"), {})
    assert (report.outcome, report.longrepr, report.when) == ("failed", "the reason", "setup")


def test_output_of_a_file_is_kept(reporting: Reporting) -> None:
    report: Any = object()
    reporting.reporter.pytest_collectreport(report)
    assert reporting.mock.mock_calls == [call.output.keep_of_file(report)]


def test_warnings_of_a_test_are_posted(reporting: Reporting) -> None:
    def warned(text: str) -> Any:
        return SimpleNamespace(message=UserWarning(text), category=Outer.Inner, filename="a.py", lineno=3)

    class Outer:
        class Inner(UserWarning):
            """A category of its own."""

    name = Outer.Inner.__qualname__
    for when in ("collect", "config"):
        reporting.reporter.pytest_warning_recorded(warned("text"), when)
    assert reporting.mock.mock_calls == []
    reporting.reporter.pytest_warning_recorded(warned("text"), "runtest")
    assert reporting.mock.mock_calls == [call.wire.post(Warned(__name__, name, "text", "a.py", 3))]
    reporting.mock.reset_mock()
    reporting.reporter.pytest_warning_recorded(warned("x" * (MAX_MESSAGE + 1)), "runtest")
    [each] = reporting.mock.mock_calls
    assert len(each.args[0].text) <= MAX_MESSAGE
