"""Progress of a test that runs long: a status line on a terminal, and elsewhere a plain line now and then.

The status line is below what pytest has written, where the cursor stays, so that pytest and this need not
know of each other. Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping
from typing import Literal, TextIO

import pytest

from lockstep.controller.pytest_internals import terminal_stream
from lockstep.features.progress.glance import Glance
from lockstep.output import shows_live

SHOW_AFTER = 1.0
"""Seconds after which a test gets its status line."""
PLACES_AFTER = 1.0
"""Seconds after which ranks are asked where they are."""
FIRST_LINE = 30.0
"""Seconds after which a test gets its first plain line."""
NEXT_LINE = 60.0
"""Seconds from one plain line to the next."""
LEAD = 4.0
"""Seconds before a plain line from which ranks are asked where they are."""
SHORTEST_NAME = 12
"""Columns that the name of the test keeps on a narrow terminal."""

Way = Literal["line", "plain", "off"]


class ProgressDisplay:
    """Shows how far the test has come that this process waits for."""

    def __init__(self, config: pytest.Config, environ: Mapping[str, str]) -> None:
        self._config = config
        self._way = way_of(config, environ)
        self._line = StatusLine(config) if self._way == "line" else None
        self._next_line = FIRST_LINE

    def look(self, glance: Glance) -> bool:
        """Show how far the test has come; return whether to ask its ranks where they are."""
        if self._way == "off":
            return False
        if self._line is not None:
            if glance.elapsed >= SHOW_AFTER:
                self._line.draw(glance.label, _words(glance, self._failed(glance)))
            return glance.elapsed >= PLACES_AFTER
        if glance.elapsed >= self._next_line:
            self._next_line += NEXT_LINE
            self._write(f"still running: {glance.label}, {_words(glance, self._failed(glance))}")
        return glance.elapsed >= self._next_line - LEAD

    def end(self) -> None:
        """Remove the status line: the test has ended."""
        self._next_line = FIRST_LINE
        if self._line is not None:
            self._line.erase()

    def _failed(self, glance: Glance) -> int:
        """Return how many failures there were so far; a worker of pytest-xdist knows its test's own alone."""
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        stats = {} if terminal is None else terminal.stats
        return glance.failed + len(stats.get("failed", ())) + len(stats.get("error", ()))

    def _write(self, text: str) -> None:
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        # A worker of pytest-xdist has a terminal reporter, too, which writes to nowhere.
        if terminal is not None and not hasattr(self._config, "workerinput"):
            terminal.write_line(text)
            terminal.flush()
            return
        # The main process may be in the middle of a line of a terminal.
        start = "\n" if sys.stderr.isatty() else ""
        worker = getattr(self._config, "workerinput", {}).get("workerid", "")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{start}[{worker}] {_encodable(text, sys.stderr)}\n")
            sys.stderr.flush()


def way_of(config: pytest.Config, environ: Mapping[str, str]) -> Way:
    """Return how to show progress, where the terminal belongs to pytest's own report and to no one else."""
    option = config.option
    debugs = any(getattr(option, name, None) is not None for name in ("rank_pdb", "rank_debugpy"))
    if option.ranks_no_progress or getattr(option, "verbose", 0) < 0 or debugs:
        return "off"
    if hasattr(config, "workerinput"):
        return "plain"
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, pytest.TerminalReporter):  # as under `-p no:terminal`
        return "off"
    is_terminal = terminal_stream(config).isatty()
    if is_terminal and is_replaced(reporter):  # pytest-sugar and others draw on a terminal themselves
        return "off"
    writes = getattr(option, "capture", "no") not in ("fd", "sys") or shows_live(config)
    in_ci = "CI" in environ or "BUILD_NUMBER" in environ  # as pytest finds it out
    can_redraw = environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    return "line" if is_terminal and can_redraw and not in_ci and not writes else "plain"


def is_replaced(reporter: object) -> bool:
    """Return whether another plugin has put a class of its own in the place of pytest's report."""
    return type(reporter) is not pytest.TerminalReporter


def _words(glance: Glance, failed: int) -> str:
    limit = "" if glance.limit == float("inf") else f" of {glance.limit:.0f} s"
    parts = [f"{glance.elapsed:.0f} s{limit}", glance.activity, f"{failed} failed" if failed else ""]
    return ": ".join(filter(None, (", ".join(filter(None, parts)), glance.standing)))


class StatusLine:
    """A line below the one that pytest writes, redrawn in place."""

    def __init__(self, config: pytest.Config) -> None:
        self._writer = config.get_terminal_writer()
        self._stream = terminal_stream(config)
        self._shown: tuple[str, int] | None = None

    def draw(self, name: str, words: str) -> None:
        """Show a text, shortened to the width of the terminal, unless it is shown already."""
        columns = shutil.get_terminal_size().columns
        with contextlib.suppress(OSError, ValueError):  # not by COLUMNS, which does not follow
            columns = os.get_terminal_size(self._stream.fileno()).columns or columns
        name, words = _encodable(name, self._stream), _encodable(words, self._stream)
        text = fit(name, words, columns - 1)
        if self._shown != (text, columns):
            self._write(self._writer.markup(text, light=True), columns)
            self._shown = text, columns

    def erase(self) -> None:
        """Remove the line, if one is shown."""
        if self._shown is not None:
            self._write("", self._shown[1])
            self._shown = None

    def _write(self, text: str, columns: int) -> None:
        """Replace all below the cursor's line; the cursor comes back to where pytest has left it."""
        column = self._writer.width_of_current_line
        if column and column % columns == 0:
            return  # the cursor is between two lines, and could not return there
        right = f"\x1b[{column % columns}C" if column % columns else ""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"\n\x1b[J{text}\x1b[A\r{right}")
            self._stream.flush()


def fit(name: str, words: str, columns: int) -> str:
    """Return both in so many columns: the name loses its beginning first, then the words their end."""
    room = max(columns - width(words) - 2, SHORTEST_NAME)
    if width(name) > room:
        name = f"..{_tail(name, room - 2)}"
    text = f"{name}  {words}"
    return text if width(text) <= columns else f"{_tail(text[::-1], columns - 2)[::-1]}.."


def width(text: str) -> int:
    """Return how many columns a text takes."""
    return sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _tail(text: str, columns: int) -> str:
    """Return as much of the end of a text as fits."""
    start = len(text)
    while start and (columns := columns - _width(text[start - 1])) >= 0:
        start -= 1
    return text[start:]


def _encodable(text: str, stream: TextIO) -> str:
    """Escape what a stream cannot show, and what is no character of a line."""
    text = "".join(each if each.isprintable() else "?" for each in text)
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
