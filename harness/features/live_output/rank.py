"""Output of a rank that the user sees while the test runs: live logs, `--log-file` and `--setup-show`.

Runs inside a rank; must not import torch.
"""

from __future__ import annotations

import io
import logging
import os
from typing import TYPE_CHECKING

import pytest

from lockstep.features.live_output import FEATURE, Shown
from lockstep.features.live_output.pytest_internals import make_terminal_writer, replace_log_handlers
from lockstep.output import log_file, shows_logs
from lockstep.protocol import Part

if TYPE_CHECKING:
    from lockstep.rank.process import Rank


class SentOutput:
    """Sends what pytest would show, or write to its log file, to the controller, which does.

    Made before the options of a rank are changed, which itself writes no log file.
    """

    def __init__(self, rank: Rank, config: pytest.Config) -> None:
        self._rank = rank
        self._has_log_file = log_file(config) not in ("", os.devnull)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        config, rank = session.config, self._rank
        replace_log_handlers(
            config,
            SentLog(rank, to_file=False) if shows_logs(config) else None,
            SentLog(rank, to_file=True) if self._has_log_file else None,
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
            self._rank.wire.send(
                Part(FEATURE, Shown(self._rank.world.rank, self.format(record), self._to_file))
            )

    def reset(self) -> None: ...  # pytest calls it before each test

    def set_when(self, when: str | None) -> None: ...  # and this before each phase


class SentLines:
    """A text stream whose lines are shown by the controller."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if shown := "\n".join(filter(None, lines)):
            self._rank.wire.send(Part(FEATURE, Shown(self._rank.world.rank, shown)))
        return len(text)

    def flush(self) -> None:
        """Send what there is of a line: pytest ends the line of a test when it shows the next thing."""
        if self._begun.strip():
            self.write("\n")

    def isatty(self) -> bool:
        return False
