"""Output of a rank that the user sees while the test runs: live logs, `--log-file`, `--setup-show` and `-s`.

Runs inside a rank; must not import torch.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.output import log_file, shows_logs
from lockstep.protocol import Shown
from lockstep.rank.pytest_internals import make_terminal_writer, replace_log_handlers

if TYPE_CHECKING:
    from lockstep.rank.process import Rank


def wants_log_file(config: pytest.Config) -> bool:
    """Whether pytest writes a log file."""
    return log_file(config) not in ("", os.devnull)


def show_live(rank: Rank, config: pytest.Config, writes_file: bool) -> None:
    """Send what pytest would show, or write to its log file, to the controller, which does.

    Args:
        writes_file: whether the controller writes a log file.
    """
    replace_log_handlers(
        config,
        SentLog(rank, to_file=False) if shows_logs(config) else None,
        SentLog(rank, to_file=True) if writes_file else None,
    )
    # Without a terminal plugin pytest's own raises; pytest-icdiff asks it for colours in an assertion.
    stream = SentLines(rank) if config.getoption("setupshow", False) else io.StringIO()
    writer = make_terminal_writer(config, stream)
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]


class SentLog(logging.Handler):
    """Sends records to the controller, which writes them to the terminal or to the log file."""

    def __init__(self, rank: Rank, to_file: bool) -> None:
        super().__init__()
        self._rank = rank
        self._pid = os.getpid()
        self._to_file = to_file

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() == self._pid:  # not in a process that a test has forked
            self._rank.send(Shown(self.format(record), self._to_file))

    def reset(self) -> None:
        """Do nothing; pytest calls it before each test."""

    def set_when(self, when: str | None) -> None:
        """Do nothing; pytest calls it before each phase."""


class SentLines:
    """A text stream whose lines are shown by the controller."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if shown := "\n".join(filter(None, lines)):
            self._rank.send(Shown(shown))
        return len(text)

    def flush(self) -> None:
        """Send what there is of a line: pytest ends the line of a test when it shows the next thing."""
        if self._begun.strip():
            self.write("\n")

    def isatty(self) -> bool:
        return False


def prefix_streams(name: Callable[[], str]) -> None:
    """Begin each line of `sys.stdout` and `sys.stderr` with the rank's name: ranks share the terminal."""
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, PrefixedStream(getattr(sys, stream), name))


def end_lines() -> None:
    """End the lines that a test has left unfinished: the next test's output must not go on with them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PrefixedStream):
            stream.end_line()


class PrefixedStream:
    """A text stream that writes whole lines, each with a prefix; all else is that of the stream below.

    Threads may write at once, as to any text stream.
    """

    def __init__(self, stream: Any, name: Callable[[], str]) -> None:
        self._stream = stream
        self._name = name
        self._begun = ""
        self._is_in_line = False
        self._writing = threading.RLock()  # a finaliser may print, too

    def write(self, text: str) -> int:
        with self._writing:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._put("\n".join([*lines, ""]))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Write what there is of a line, a progress bar for example."""
        with self._writing:
            begun, self._begun = self._begun, ""
            self._put(begun)

    def end_line(self) -> None:
        with self._writing:
            self.flush()
            if self._is_in_line:
                self._put("\n")

    def _put(self, text: str) -> None:
        if not text:
            return
        prefix = f"{self._name()}: "
        first = "" if self._is_in_line else prefix
        self._is_in_line = not text.endswith("\n")
        body = text.removesuffix("\n")
        self._stream.write(first + body.replace("\n", f"\n{prefix}") + text[len(body) :])
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
