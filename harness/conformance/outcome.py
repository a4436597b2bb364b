"""What an engine made of one point of a claim, as read off one report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import pytest

LONGEST_TEXT = 12_000
"""Characters of a failure's text that are kept: what is left out stood in its middle."""

# As NotOffered says it; behind the name of its class, which pytest adds.
_NOT_OFFERED = re.compile(r"(?:\S*NotOffered: )?\S+ does not offer: (?P<what>.+)", re.DOTALL)
_MENDED = re.compile(r"^\[XPASS\(strict\)\] (?P<reason>.*)", re.MULTILINE)
_ONLY_SUBTESTS = re.compile(r"contains \d+ failed subtests?")


class Outcome(StrEnum):
    """Ordered: of the points of a claim, the first of these that occurs is the claim's."""

    BROKEN = "broken"
    MENDED = "mended"
    DEVIATION = "known deviation"
    HELD = "held"
    NOT_OFFERED = "not offered"
    SKIPPED = "skipped"
    NOT_RUN = "not run"

    @property
    def holds(self) -> bool:
        """Whether the engine did what was claimed, expected or not."""
        return self in (Outcome.HELD, Outcome.MENDED)


@dataclass(frozen=True, slots=True)
class Point:
    """One subtest of a claim, or, with no name, the test itself."""

    name: str
    outcome: Outcome
    reason: str = ""
    """The capability that is not offered, why the engine deviates, why the test was skipped."""
    text: str = ""
    """What pytest says of a failure."""


def read_point(report: pytest.TestReport) -> Point | None:
    """Return what a report says; None if it adds nothing to what other reports of the test say."""
    name = _name_of(report)
    if hasattr(report, "wasxfail") and report.skipped:
        reason = report.wasxfail.removeprefix("reason: ").replace("[NOTRUN]", "not tried:")
        return Point(name, Outcome.DEVIATION, reason)
    if report.skipped:
        return _skipped(name, report)
    if report.failed:
        text = report.longreprtext
        if mended := _MENDED.search(text):
            return Point(name, Outcome.MENDED, mended["reason"])
        return None if not name and _ONLY_SUBTESTS.fullmatch(text) else _broken(name, report, text)
    return Point(name, Outcome.HELD) if report.when == "call" else None


def _name_of(report: pytest.TestReport) -> str:
    context = getattr(report, "context", None)  # of a subtest
    if context is None:
        return ""
    settings = ", ".join(f"{key}={value}" for key, value in context.kwargs.items())
    return " ".join(filter(None, (context.msg, settings))) or "a subtest"


def _skipped(name: str, report: pytest.TestReport) -> Point:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    reason = told.removeprefix("Skipped: ")
    if found := _NOT_OFFERED.fullmatch(reason):
        return Point(name, Outcome.NOT_OFFERED, found["what"])
    return Point(name, Outcome.SKIPPED, reason)


def _broken(name: str, report: pytest.TestReport, text: str) -> Point:
    when = "" if report.when == "call" else f"in {report.when}\n"
    text = when + text
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return Point(name, Outcome.BROKEN, text=text)
