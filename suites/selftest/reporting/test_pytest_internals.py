"""Unit tests of what is read off pytest's representations of failures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.reporting.pytest_internals import (
    as_traceback,
    crash_message,
    crash_of,
    drop_note_of_hidden_frames,
    has_traceback,
    lines,
    links,
    location_of,
    messages,
    places,
)


def fails() -> None:
    raise KeyError("first")


def fails_after() -> None:
    try:
        fails()
    except KeyError as error:
        raise ValueError("second\nand more") from error


LINES = [code.__code__.co_firstlineno for code in (fails, fails_after)]


def report_of(longrepr: Any, line: int | None = 6) -> pytest.TestReport:
    return pytest.TestReport("a.py::test", ("a.py", line, "test"), {}, "failed", longrepr, "call")


def failed(style: Any = "long") -> pytest.TestReport:
    with pytest.raises(ValueError, match="second") as caught:
        fails_after()
    return report_of(caught.getrepr(style=style))


def test_a_chain_of_exceptions_has_their_messages_and_the_places_of_the_last() -> None:
    report = failed()
    own = Path(__file__).name
    assert len(links(report)) == 2
    assert messages(report) == ["KeyError: 'first'", "ValueError: second\nand more"]
    assert [(Path(place.path).name, place.lineno) for place in places(report)][-1] == (own, LINES[1] + 4)
    assert lines(report)[-1].endswith(f"{own}:{LINES[1] + 4}")
    assert crash_of(report) == f"{__file__}:{LINES[1] + 4}"
    assert has_traceback(report)


def test_a_traceback_of_python_has_a_message_and_no_places() -> None:
    report = failed("native")
    assert [description for _, _, description in links(report)] == [None]
    assert messages(report) == ["ValueError: second\nand more"]
    assert places(report) == []
    assert lines(report) == ("a.py:7",)
    assert has_traceback(report)


def test_a_message_without_a_traceback_is_all_there_is() -> None:
    report = failed("value")
    assert not has_traceback(report)
    text = report_of("a\nE   ValueError: one\n  E  no\nE   and two")
    assert (links(text), places(text), crash_of(text)) == ([], [], "")
    assert messages(text) == ["ValueError: one", "and two"]
    assert messages(report_of("no mark")) == ["no mark"]
    assert messages(report_of(None)) == ["(no message)"]
    assert not has_traceback(text)
    at = location_of(report_of("", line=None), "x")
    assert (at.path, at.lineno, at.message) == ("a.py", 1, "x")


def test_the_message_of_a_failure_that_was_sent_is_that_of_its_line() -> None:
    crash = {"reprcrash": {"message": "ValueError: no"}}
    assert crash_message({"outcome": "failed", "longrepr": crash}) == "ValueError: no"
    others: list[tuple[str, Any]] = [
        ("passed", None),
        ("skipped", crash),
        ("failed", "text"),
        ("failed", {"reprcrash": None}),
    ]
    assert {crash_message({"outcome": outcome, "longrepr": each}) for outcome, each in others} == {""}


def test_a_text_is_shown_as_it_is_and_the_note_of_hidden_frames_is_not() -> None:
    (entry,) = as_traceback("one\ntwo\n\n").reprentries
    assert entry.lines == ["one\ntwo\n"]
    (entry,) = as_traceback("").reprentries
    assert entry.lines == []
    shown: list[Any] = [
        SimpleNamespace(extraline=text) for text in ("All traceback entries are hidden. x", "y", None)
    ]
    for each in shown:
        drop_note_of_hidden_frames((each, None, None))
    assert [each.extraline for each in shown] == [None, "y", None]
