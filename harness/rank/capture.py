"""Capture of output as a rank does it: by pytest, into files that outlive the rank.

Changes pytest in this process; runs in a rank, before its session.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import pytest
from _pytest import capture

STREAMS = {1: "stdout", 2: "stderr"}


def capture_into(directory: str) -> None:
    """Let every capture of a file descriptor write into a file of `directory`, which exists while it lasts.

    pytest captures into files without a name, which end with the process; those of subtests and of `capfd`
    are made in the midst of a test, too late to tell anyone of them. It offers no way to choose the files.
    """
    os.makedirs(directory, mode=0o700)
    start, done = capture.FDCaptureBase.start, capture.FDCaptureBase.done
    paths: dict[object, str] = {}
    numbers = itertools.count()

    def start_in_file(self: capture.FDCaptureBase[Any]) -> None:
        if self.targetfd in STREAMS:
            paths[self] = f"{directory}/{next(numbers):09}.{STREAMS[self.targetfd]}"
            _put_under(self.tmpfile.fileno(), paths[self])
        start(self)

    def done_with_file(self: capture.FDCaptureBase[Any]) -> None:
        done(self)
        with contextlib.suppress(KeyError, OSError):  # done twice, or by a process that was forked in a test
            os.unlink(paths.pop(self))

    setattr(capture.FDCaptureBase, "start", start_in_file)  # noqa: B010
    setattr(capture.FDCaptureBase, "done", done_with_file)  # noqa: B010


def _put_under(descriptor: int, path: str) -> None:
    """Let an open descriptor mean the new file `path`."""
    named = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.dup2(named, descriptor, inheritable=False)
    os.close(named)


def tee_where_captured_in_memory(config: pytest.Config) -> None:
    """Under --capture=sys, let what Python prints go to the rank's log as well: memory ends with the rank."""
    options = config.known_args_namespace
    if options.capture == "sys":
        options.capture = "tee-sys"
