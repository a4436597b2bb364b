"""Private names of pytest that a rank uses, each with what to look for when it moves. Seen in pytest 9.2.

Runs inside a rank; imports pytest only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from _pytest import capture
from _pytest._code.code import filter_traceback
from _pytest.config import create_terminal_writer
from _pytest.debugging import PdbInvoke
from _pytest.junitxml import bin_xml_escape, xml_key
from _pytest.reports import pytest_report_to_serializable
from _pytest.runner import check_interactive_exception

FOLDER = "/_pytest/"
"""Part of the path of every file of pytest's own."""

# The capture of one file descriptor: `targetfd`, `tmpfile`, `start()`, `done()`. Subtests and `capfd`
# make one in the middle of a test, and pytest has no way to choose its file. If it moves: the base of
# `FDCapture`.
FD_CAPTURE: Any = capture.FDCaptureBase

XML_REPORT = cast("pytest.StashKey[object]", xml_key)
"""Where `record_testsuite_property` and `record_xml_attribute` find pytest's XML report."""

escape_for_xml = bin_xml_escape
serialise_report = pytest_report_to_serializable
"""pytest's own implementation of the hook, which knows `TestReport` and `CollectReport`."""

is_of_user = filter_traceback
"""Whether pytest shows an entry of a traceback: it is not pytest's own, nor pluggy's."""
is_interactive = check_interactive_exception
"""Whether pytest would debug what a call has raised: no skip and no expected failure."""


def tear_down_except_for(item: pytest.Item) -> None:
    """Tear down the fixtures and collectors that are set up and that the item does not need.

    If it moves: what pytest's own `pytest_runtest_teardown` does for its `nextitem`.
    """
    item.session._setupstate.teardown_exact(item)


def captured_sections(item: pytest.Item) -> list[tuple[str, str, str]]:
    """Return the list of (phase, kind, text) from which the sections of the item's reports are made."""
    return item._report_sections


def waiting_conftests(session: pytest.Session) -> dict[Path, object]:
    """Return the conftests that wait for the collection of their directory, since pytest 9.1."""
    waiting: dict[Path, object] = getattr(session._fixturemanager, "_pending_conftests", {})
    return waiting


def open_debugger(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Open pytest's own debugger on a failure.

    Raises:
        pytest.exit.Exception: the user has quit it.
    """
    # pytest's debugger writes to the terminal plugin, which no rank has, and needs no more of it than this.
    reporter = SimpleNamespace(_tw=create_terminal_writer(item.config, sys.__stdout__))
    plugins = item.config.pluginmanager
    plugins.register(reporter, "terminalreporter")
    try:
        PdbInvoke().pytest_exception_interact(item, call, report)
    finally:
        plugins.unregister(reporter)
        vars(report).pop("_pdbshown", None)  # the merged report has more than was shown
