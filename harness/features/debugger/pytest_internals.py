"""The private names of pytest that the debugger uses, on both sides, seen in pytest 9.0 to 9.2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from _pytest.debugging import PdbInvoke
from _pytest.runner import check_interactive_exception

is_interactive = check_interactive_exception
"""Return whether pytest would debug what a call has raised: no skip and no expected failure."""
_TERMINAL = "terminalreporter"


@contextlib.contextmanager
def uncaptured_streams(config: pytest.Config) -> Iterator[None]:
    """Put the streams that pytest was started with in the place of those of its capture.

    If it moves: the methods of the plugin `capturemanager` that `pytest.set_trace` calls.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend_global_capture(in_=True)
    try:
        yield
    finally:  # outside of tests pytest captures the input, and not the output
        capture.resume_global_capture()
        capture.suspend_global_capture()


def open_debugger(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Open pytest's own debugger on a failure.

    Raises:
        pytest.exit.Exception: the user has quit it.
    """
    # pytest's debugger writes to the terminal plugin, which no rank has, and needs no more of it than this.
    reporter = SimpleNamespace(_tw=create_terminal_writer(item.config, sys.__stdout__))
    plugins = item.config.pluginmanager
    plugins.unblock(_TERMINAL)
    plugins.register(reporter, _TERMINAL)
    try:
        PdbInvoke().pytest_exception_interact(item, call, report)
    finally:
        plugins.unregister(reporter)
        plugins.set_blocked(_TERMINAL)
        vars(report).pop("_pdbshown", None)  # the merged report has more than was shown
