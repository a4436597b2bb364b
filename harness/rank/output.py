"""The output of a rank's tests: captured in files that outlive it, and truncated; or shown with its name."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.output import KEEP_ALL, MAX_TEXT, OutputDirectory, truncate
from lockstep.rank.pytest_internals import FD_CAPTURE, captured_sections
from lockstep.rank.world_fixture import RankWorld


class TestOutput:
    """The captured output of the test that runs.

    Args:
        directory: of `--rank-output-dir`, "" for none.
    """

    def __init__(self, world: RankWorld, directory: str) -> None:
        self._world = world
        self._directory = OutputDirectory(directory) if directory else None
        self._num_settled = 0

    def begin(self, item: pytest.Item) -> None:
        self._num_settled = len(captured_sections(item))

    def settle(self, item: pytest.Item) -> None:
        """Store and truncate the output of a phase, before its report is made.

        In place: an item keeps its sections for the rest of the session.
        """
        sections = captured_sections(item)
        for i in range(self._num_settled, len(sections)):
            when, kind, text = sections[i]
            sections[i] = (when, kind, self._store(item.nodeid, kind, text))
        self._num_settled = len(sections)

    def settle_subtest(self, report: pytest.TestReport) -> None:
        """Store and truncate the output of a subtest; the sections before it are those of the set-up."""
        for i, (title, text) in enumerate(report.sections[self._num_settled :], self._num_settled):
            report.sections[i] = (title, self._store(report.nodeid, _kind(title), text))

    def keep_of_file(self, report: pytest.CollectReport) -> None:
        """Store what a file printed when it was imported, in place of what it printed in an earlier world."""
        if self._directory is not None:
            for title, text in report.sections:
                with contextlib.suppress(OSError):  # the controller has checked that it can be written
                    self._directory.write(report.nodeid, self._world.rank, _kind(title), text, "w")

    def _store(self, nodeid: str, kind: str, text: str) -> str:
        remedy = KEEP_ALL
        if self._directory is not None:
            try:
                file = self._directory.write(nodeid, self._world.rank, kind, text, "a")
                remedy = f"all of it is in {file}"
            except OSError as error:
                text += f"\n(could not be kept: {error})"
        return truncate(text, MAX_TEXT, remedy)


def _kind(title: str) -> str:
    """Return the "stdout" of the title "Captured stdout call", and the title of a plugin as it is."""
    words = title.split()
    return words[1] if len(words) > 1 and words[0] == "Captured" else title


STREAMS = {1: "stdout", 2: "stderr"}


def capture_into(directory: str) -> None:
    """Make every capture of a file descriptor write into a file of `directory`, which exists while it lasts.

    pytest captures into files without a name, which end with the process. The controller reads these where a
    rank dies in a test.
    """
    os.makedirs(directory, mode=0o700)
    start, done = FD_CAPTURE.start, FD_CAPTURE.done
    paths: dict[object, str] = {}
    numbers = itertools.count()

    def start_in_file(self: Any) -> None:
        if self.targetfd in STREAMS:
            paths[self] = f"{directory}/{next(numbers):09}.{STREAMS[self.targetfd]}"
            named = os.open(paths[self], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.dup2(named, self.tmpfile.fileno(), inheritable=False)
            os.close(named)
        start(self)

    def done_with_file(self: Any) -> None:
        done(self)
        with contextlib.suppress(KeyError, OSError):  # done twice, or by a process that was forked in a test
            os.unlink(paths.pop(self))

    FD_CAPTURE.start = start_in_file
    FD_CAPTURE.done = done_with_file


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
