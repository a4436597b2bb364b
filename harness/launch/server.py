"""The forkserver: imports what ranks need before it forks them; cleans up after a controller that crashed.

Runs in the server. `multiprocessing` imports this module first; an environment variable names what else to
import. Standard library only until then.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path

from lockstep.launch.limits import explain
from lockstep.launch.multiprocessing_internals import STRAY_CHILD_WARNING
from lockstep.process_tree import adopt_orphans, children_of, end, kill_group

SETUP_VARIABLE = "LOCKSTEP_SERVER"
LAST_WORDS = "server.died"
"""The file, in the directory of the controller, in which the server writes why it died."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that reach all processes of a terminal or a job. The server ends when its controller has ended."""
LOOK_EVERY = 0.2
"""Seconds between looks at the controller while the server imports."""
EVERY_RANK_IMPORTS = (
    *("torch", "torch.distributed", "torch.utils._device"),
    *("numpy", "numpy.random", "pytest", "pdb", "xml.etree.ElementTree", "lockstep.launch.bootstrap"),
)
"""Modules, besides those of the rank's program, that every rank, or nearly every one, would import itself."""
SLOW_IMPORTS = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch._dynamo", "torch._dynamo.repro.after_dynamo"),
)
"""Modules of torch that take long to import. A controller that has imported some as it starts ranks, or whose
tests will, names them in `MORE_IMPORTS` and sends the signal `IMPORT_MORE`: the ranks need them, too."""
MORE_IMPORTS = "imports.json"
IMPORT_MORE = signal.SIGUSR1


def status_path(directory: str) -> Path:
    """Return where the server writes, as JSON, that it is ready: failed imports and its number of threads."""
    return Path(directory) / "server.json"


def _prepare(
    sys_path: list[str], imports: dict[str, list[str]] | None, directory: str, controller: int
) -> None:
    """Import what ranks need, then `imports`, and write how it went; import nothing if that is None.

    Of `imports["hints"]` only what can be imported is; `modules` and `preload` must be importable.

    The garbage collector is off until the end, which saves a fifth of the time, and what is imported then is
    frozen: ranks neither traverse nor copy it.
    """
    sys.path[:] = sys_path
    sys.excepthook = functools.partial(_write_last_words, os.getpid(), directory)
    _end_with(controller, directory)
    gc.disable()
    failures = {}
    needed = () if imports is None else (*EVERY_RANK_IMPORTS, *imports["modules"], *imports["preload"])
    for name in needed:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever a user's module raises is reported to the user
            failures[name] = f"{type(error).__name__}: {error}"
    # torch's modules for tests ask for GPUs, and an answer by CUDA itself would spoil CUDA for the ranks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in () if imports is None else imports["hints"]:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    gc.freeze()
    _import_more_at_a_signal(directory)
    adopt_orphans()  # of ranks that were killed: what a test has put into a session of its own
    warnings.filterwarnings("ignore", STRAY_CHILD_WARNING)
    signal.setitimer(signal.ITIMER_REAL, 0)  # from here on the end of the controller's pipe is seen
    # After the imports: handlers run in reverse order, and this one ends the process.
    atexit.register(_leave, os.getpid(), directory)
    try:
        threads = len(os.listdir("/proc/self/task"))  # native ones, too: a fork copies only one
    except OSError:
        threads = threading.active_count()
    status = {"failures": failures, "threads": threads}
    partial = status_path(directory).with_suffix(".partial")
    partial.write_text(json.dumps(status))
    partial.rename(status_path(directory))


def _import_more_at_a_signal(directory: str) -> None:
    """Import what the controller names in a file, at its signal; the next fork waits for that."""

    def import_more(*_: object) -> None:
        for name in json.loads(Path(directory, MORE_IMPORTS).read_text()):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        gc.freeze()

    def forget() -> None:
        if signal.getsignal(IMPORT_MORE) is import_more:
            signal.signal(IMPORT_MORE, signal.SIG_DFL)

    signal.signal(IMPORT_MORE, import_more)
    os.register_at_fork(after_in_child=forget)


def _end_with(controller: int, directory: str) -> None:
    """End, with the directory, as soon as the controller is gone, even in an import that never finishes."""

    def look(*_: object) -> None:
        if os.getppid() != controller:
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY, LOOK_EVERY)


def _write_last_words(server: int, directory: str, _: object, error: BaseException, *__: object) -> None:
    """Write for the controller why the server, or a fork of it on its way to be a rank, died."""
    if not isinstance(error, EOFError) or os.getpid() == server:  # a fork whose controller has gone away
        with contextlib.suppress(OSError):
            Path(directory, LAST_WORDS).write_text(explain(error))
    os._exit(1)


def last_words(directory: str) -> str:
    """Return why a server died, as far as it could write it; remove the note."""
    path = Path(directory, LAST_WORDS)
    words = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return words


def _leave(server_pid: int, directory: str) -> None:
    """End at once, with the directory of the controller, which has ended, and the ranks that it has left.

    Ranks lead process groups of their own, so what their tests started ends with them, even if it holds the
    GIL or is stopped; what has left the group is a child of the server then.
    """
    if os.getpid() != server_pid:
        return
    for entry in Path(directory).glob("ranks/*"):
        with contextlib.suppress(FileNotFoundError):
            kill_group(int(entry.name), entry.read_text())
    end(lambda: children_of(server_pid), patience=0.0)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # tearing down an interpreter full of torch takes 0.1 s


if SETUP_VARIABLE in os.environ:
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    _prepare(**json.loads(os.environ.pop(SETUP_VARIABLE)))
