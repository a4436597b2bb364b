"""The first steps of a new process on its way to be a rank; standard library only until the path is set."""

from __future__ import annotations

import fcntl
import io
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from lockstep.launch.limits import explain
from lockstep.launch.multiprocessing_internals import close_server_pipe, forget_start_method
from lockstep.process_tree import start_of
from lockstep.protocol import StartFailed
from lockstep.specification import RankSpec


class Rank(Protocol):
    """The part of a rank that starting it needs."""

    def join(self) -> None: ...
    def fail_to_start(self, why: str) -> None: ...
    def run(self, *, names_lines: bool) -> None: ...


class SentLoan(Protocol):
    """Streams that a feature of the controller lends to the rank."""

    def take(self) -> None: ...


MakeRank = Callable[[RankSpec, Connection], Rank]


def start_rank(make: str, spec: RankSpec, wire: Connection, loan: SentLoan | None) -> None:
    """Take over the controller's environment, then run the rank until it is asked to close.

    The process leads a session of its own: a Ctrl-C on the terminal reaches the controller alone, and
    whatever a test leaves running can be ended together with the rank.

    Args:
        make: `module:name` of a `MakeRank`. A name, because it may be imported only when `sys.path` is the
            controller's.
    """
    os.setsid()
    os.set_inheritable(wire.fileno(), False)  # as Python's own; gloo's connections differ in that
    # The server ignores signals, and writes exceptions to a file.
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)
    try:
        _take_over(spec)
    except OSError as error:
        wire.send((StartFailed(explain(error)),))
        return
    if spec.held:
        hold(spec.held)
    make_rank: MakeRank = pkgutil.resolve_name(make)
    rank = make_rank(spec, wire)
    try:
        rank.join()
    except Exception as error:  # torch raises its own kinds; their messages are what counts
        rank.fail_to_start(f"it could not join its process group: {explain(error)}")
        os._exit(1)
    if loan is not None:
        loan.take()
    rank.run(names_lines=loan is None)


def hold(path: str) -> int:
    """Share the lock of a file for this process's life; return the descriptor that keeps it."""
    keeper = os.open(path, os.O_RDONLY)
    fcntl.flock(keeper, fcntl.LOCK_SH)
    return keeper


def _take_over(spec: RankSpec) -> None:
    # Only the controller may hold the server's pipe. Otherwise a server whose controller was killed would
    # live until its last rank ends, which may never be.
    close_server_pipe()
    forget_start_method()
    Path(spec.directory, "..", "ranks", str(os.getpid())).write_text(start_of(os.getpid()))
    session = spec.session
    os.environ.clear()
    os.environ.update(session.environ)
    if session.workerinput["workerid"] == "master":  # else pytest-xdist has set these
        worker = spec.workerinput()
        os.environ["PYTEST_XDIST_WORKER"] = worker["workerid"]
        os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(worker["workercount"])
        os.environ["PYTEST_XDIST_TESTRUNUID"] = worker["testrunuid"]
    sys.argv[:] = session.argv
    sys.path[:] = session.sys_path
    os.chdir(session.cwd)
    if session.captures:
        # For what is written outside of pytest's capture, by a C++ abort, for example.
        log = os.open(spec.path_of("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
    # Each line when it is complete, whatever PYTHONUNBUFFERED says: the lines of ranks that share a terminal
    # stay apart, and a rank that dies loses no complete line.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
