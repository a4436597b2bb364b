"""The first steps of a new process on its way to be a rank; standard library only until the path is set."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.launch.limits import explain
from harness.launch.terminal import SentTerminal
from harness.protocol import RankSpec, StartFailed


def become_rank(spec: RankSpec, wire: Connection, terminal: SentTerminal | None) -> None:
    """Take over the controller's surroundings, then run the rank until it is told to close.

    The process leads a session of its own: a Ctrl-C on the terminal reaches the controller alone, and
    whatever a test leaves running can be ended together with the rank.
    """
    os.setsid()
    _undo_server()
    try:
        _take_over(spec)
    except OSError as error:
        wire.send((StartFailed(explain(error)),))
        return
    share = None
    if spec.lease is not None:
        from harness.launch.lease_store import LeaseShare

        share = LeaseShare(spec.lease)
    from harness.rank import Rank

    rank = Rank(spec, wire, share)
    try:
        rank.join()
    except Exception as error:  # torch raises its own kinds; what they say is what counts
        rank.send(StartFailed(f"it could not join its process group: {explain(error)}"))
        os._exit(1)
    if terminal is not None:
        terminal.take()
    rank.run()


def _undo_server() -> None:
    """Heed the signals that the server ignores, and let exceptions be told as in any process."""
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)


def _take_over(spec: RankSpec) -> None:
    _let_go_of_server()
    # Tests start processes as they would anywhere: how this one was started is no matter of theirs.
    multiprocessing.set_start_method(None, force=True)
    Path(spec.directory, "..", "ranks", str(os.getpid())).touch()
    session = spec.session
    os.environ.clear()
    os.environ.update(session.environ)
    sys.argv[:] = session.argv
    sys.path[:] = session.sys_path
    os.chdir(session.cwd)
    if session.captures:
        _redirect_streams(spec.log_path)
    _write_whole_lines()


def _let_go_of_server() -> None:
    """Close this rank's end of the pipe that keeps the server alive: only the controller shall hold it.

    Otherwise a server whose controller was killed would live until its last rank ends, which may never be.
    """
    running: Any = forkserver._forkserver
    if running._forkserver_alive_fd is not None:
        os.close(running._forkserver_alive_fd)
        running._forkserver_alive_fd = None


def _write_whole_lines() -> None:
    """Write each line when it is complete, whatever PYTHONUNBUFFERED says.

    So the lines of ranks that share a terminal stay apart, and a rank that dies takes no line along.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _redirect_streams(path: str) -> None:
    """Send what is written outside of pytest's capture (a C++ abort, say) to the rank's log."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
