"""Standard streams that a test closes or replaces: pytest, and every later test, would write to nowhere.

A plugin of the rank's pytest session. Its hooks run inside those of pytest's capture, where `sys.stdout` is
what the test sees; what is replaced under capture, pytest itself puts back after each phase.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback

_NAMES = ("stdout", "stderr")


class Streams:
    """Keeps `sys.stdout` and `sys.stderr` open and in their place, and notes what tests tried."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._of_fixtures: dict[str, Any] = {}
        self._noted: list[str] = []

    def take_notes(self) -> list[str]:
        """Return what the test did to the streams, a line each, and forget it."""
        noted, self._noted = self._noted, []
        return noted

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._before = {name: getattr(sys, name) for name in _NAMES}
        for name, stream in self._before.items():
            if stream is not None and "close" not in vars(stream):
                stream.close = lambda name=name: self._noted.append(f"sys.{name} closed")
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self._of_fixtures = {name: getattr(sys, name) for name in _NAMES}
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            for name, stream in self._before.items():
                now = getattr(sys, name)
                if now is not stream and now is not self._of_fixtures.get(name, stream):
                    setattr(sys, name, stream)
                    self._noted.append(f"sys.{name} replaced by {now!r}")
