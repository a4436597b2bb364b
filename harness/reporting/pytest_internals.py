"""Private names of pytest that reports of failures consist of, as seen in 9.2. Runs in the controller.

`_pytest._code.code` represents tracebacks: what terminals, XML and xdist read of a failure (`longrepr`).
`_pytest.junitxml` has `bin_xml_escape` for any text in the XML report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest.junitxml import bin_xml_escape

__all__ = ["ExceptionChainRepr", "ReprFileLocation", "bin_xml_escape"]

Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]
"""One exception of a chain, as pytest represents it."""


def links(report: pytest.TestReport | pytest.CollectReport) -> list[Link]:
    """Return the chain of exceptions of a failure, empty if pytest has only a text."""
    match report.longrepr:
        case ExceptionChainRepr() as longrepr:
            return list(longrepr.chain)
        case ReprExceptionInfo() as longrepr:  # under --tb=native
            return [(longrepr.reprtraceback, longrepr.reprcrash, None)]
        case _:
            return []


def has_traceback(report: pytest.TestReport) -> bool:
    """Return whether a failure shows more than its message, as `pytest.fail(pytrace=False)` does not."""
    return any(entry.style != "value" for entry, _, _ in links(report))


def messages(report: pytest.TestReport) -> list[str]:
    """Return the message of every exception of the report's chain, the one that ended the phase last."""
    messages = [crash.message for _, crash, _ in links(report) if crash is not None]
    # Where every frame is hidden there is no line to point at, but there is the text.
    messages = messages or re.findall(r"^E +(\S.*)$", report.longreprtext, re.MULTILINE)
    return messages or [report.longreprtext or "(no message)"]


def places(report: pytest.TestReport | pytest.CollectReport) -> list[ReprFileLocation]:
    """Return the places that the traceback goes through, the test's own first; empty if pytest shows none."""
    chain = links(report)
    found = [getattr(entry, "reprfileloc", None) for entry in chain[-1][0].reprentries] if chain else []
    return [place for place in found if place is not None]


def lines(report: pytest.TestReport) -> tuple[str, ...]:
    """Return `places`, or the first line of the test, as `file:line`."""
    return tuple(f"{at.path}:{at.lineno}" for at in places(report) or [location_of(report, "")])


def crash_of(report: pytest.TestReport) -> str:
    """Return the line that pytest takes for that of the failure, as `file:line`, else ""."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else f"{crash.path}:{crash.lineno}"


def crash_message(data: Mapping[str, Any]) -> str:
    """Return the message of a failure that was sent, with its other lines; "" if there is none."""
    longrepr = data["longrepr"] if data["outcome"] == "failed" else None
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return str(crash["message"]) if crash else ""


def keep_values(subtest: Any, data: Mapping[str, Any]) -> None:
    """Show the values of a subtest as they were sent: pytest takes the repr of each again as it reads them.

    If it moves: `SubtestContext._from_json` in `_pytest.subtests`.
    """
    if context := data.get("_subtest.context"):
        object.__setattr__(subtest.context, "kwargs", context["kwargs"])


def location_of(report: pytest.TestReport, message: str) -> ReprFileLocation:
    """Point to the first line of the test."""
    return ReprFileLocation(report.location[0], (report.location[1] or 0) + 1, message)


def drop_note_of_hidden_frames(link: Link) -> None:
    """Remove pytest's note that all frames are hidden: they are frames of this harness."""
    if (link[0].extraline or "").startswith("All traceback entries are hidden"):
        link[0].extraline = None


def as_traceback(text: str) -> ReprTraceback:
    """Return a representation that shows a text as it is."""
    lines = [text.rstrip("\n") + "\n"] if text else []
    return ReprTraceback([ReprEntryNative(lines)], None, style="native")
