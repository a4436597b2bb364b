"""The private and undocumented names of `multiprocessing` that starting ranks takes. Standard library only.

All were seen in Python 3.11. If one moves: `multiprocessing/forkserver.py` has a class `ForkServer` with one
instance for the process, `multiprocessing/util.py` the directory of its socket.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

UNKNOWN_EXIT_CODE = 255
"""The exit code of a forked process once the server is gone that could report it (`popen_forkserver.py`)."""
STRAY_CHILD_WARNING = "forkserver: waitpid returned unexpected pid"
"""Raised by a server that reaps a child which it has not forked itself: an orphan that it has adopted."""
pickle_message: Callable[[object], memoryview] = ForkingPickler.dumps
"""Pickles a message as `Connection.send` does (`connection.py`), once for several connections."""
MAX_TEMPORARY_DIRECTORY = 70
"""Characters. The path of a socket has at most 107, of which names that `multiprocessing` chooses take 32."""
sent_descriptor: Callable[[int], Any] = reduction.DupFd
"""Returns a duplicate of a descriptor that can be pickled as an argument of a new process."""
_server: Any = forkserver._forkserver


def server_pid() -> int | None:
    """Return the pid of the forkserver that was started last, dead or alive; None before the first."""
    pid: int | None = _server._forkserver_pid
    return pid


def start_server(module: str, ignored: tuple[signal.Signals, ...]) -> None:
    """Start the forkserver unless it runs; it imports `module` first.

    Args:
        ignored: signals that are blocked in the new process; the module is to ignore and unblock them.
    """
    forkserver.set_forkserver_preload([module])
    resource_tracker.ensure_running()  # `forkserver` would start it, and unblock the signals for that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        with without_main_module():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_server() -> None:
    """End the forkserver and wait for it; there is no public way before the interpreter ends."""
    with contextlib.suppress(FileNotFoundError):  # the server has removed its socket with the directory
        _server._stop()


def close_server_pipe() -> None:
    """In a process that the forkserver has forked: close its end of the pipe that keeps the server alive."""
    if _server._forkserver_alive_fd is not None:
        os.close(_server._forkserver_alive_fd)
        _server._forkserver_alive_fd = None


def private_directory() -> str:
    """Return the directory (mode 0700) of the forkserver's socket; it is removed as the interpreter ends.

    It is made in /tmp where TMPDIR is so deep that the socket would have too long a name to be bound, and
    where its name is no UTF-8: torch opens no file there.
    """
    chosen = tempfile.gettempdir()
    name = os.fsencode(chosen)
    if len(name) > MAX_TEMPORARY_DIRECTORY or name != chosen.encode(errors="replace"):
        tempfile.tempdir = "/tmp"
    try:
        directory: str = util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen
    return directory


def forget_start_method() -> None:
    """Forget in a rank how it was started itself: its tests start processes by the default of Python."""
    multiprocessing.set_start_method(None, force=True)


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Keep `multiprocessing` from importing the controller's main script in each new process.

    Ranks need nothing of it, and a script that calls `pytest.main()` unguarded would run itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
