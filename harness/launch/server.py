"""What the forkserver imports before it forks ranks, and how it cleans up after a controller that crashed.

Runs in the server. The forkserver preloads this module; the environment variable it was started with says
what else to import. Standard library only until then.
"""

from __future__ import annotations

import atexit
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

from harness.descendants import adopt_orphans, children_of, end

SETUP_VARIABLE = "LOCKSTEP_SERVER"
RANKS_NEED = (
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.utils._device"),
    *("numpy", "numpy.random", "pytest", "pdb", "xml.etree.ElementTree"),
    *("harness.rank", "harness.plugin", "harness.launch.entry", "harness.lockstep", "harness.recorders"),
)
"""Modules that every rank, or nearly every one, would import itself."""


def status_path(directory: str) -> Path:
    """Where the server says, as JSON, that it is ready: failed imports and its number of threads."""
    return Path(directory) / "server.json"


def _prepare(sys_path: list[str], modules: list[str], directory: str) -> None:
    """Import what ranks need, once, and say how it went.

    The garbage collector is off meanwhile, which takes a fifth of the time, and what is imported then is
    frozen: ranks neither traverse nor copy it.
    """
    sys.path[:] = sys_path
    gc.disable()
    failures = {}
    for name in (*RANKS_NEED, *_pytests_plugins(), *modules):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever a user's module raises is told to the user
            failures[name] = f"{type(error).__name__}: {error}"
    gc.freeze()
    adopt_orphans()  # of ranks that were killed: what a test has put into a session of its own
    # The forkserver wonders about children that it did not start.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    # After the imports: handlers run in reverse order, and this one ends the process.
    atexit.register(_leave, os.getpid(), directory)
    status = {"failures": failures, "threads": _thread_count()}
    partial = status_path(directory).with_suffix(".partial")
    partial.write_text(json.dumps(status))
    partial.rename(status_path(directory))


def _pytests_plugins() -> list[str]:
    """Name the modules that pytest imports at the start of every session; a wrong guess costs time only."""
    config = importlib.import_module("_pytest.config")
    return [
        f"_pytest.{name}" for name in getattr(config, "default_plugins", ()) if name != "pytester_assertions"
    ]


def _thread_count() -> int:
    """Count native threads where the system shows them (a fork copies only one), else Python's."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def say_goodbye(directory: str) -> None:
    """Let the server know, before it is ended, that the controller looks after ranks and files itself.

    The server could not tell by its parent: a killed process closes its pipes before it ceases to be one.
    """
    status_path(directory).unlink(missing_ok=True)


def _leave(server_pid: int, directory: str) -> None:
    """End at once; if the controller is gone without a goodbye, end its ranks and remove its directory.

    Ranks lead process groups of their own, so what their tests started ends with them, whether it holds the
    GIL or is stopped; what has left the group is a child of the server then.
    """
    if os.getpid() != server_pid:
        return
    if status_path(directory).exists():
        for entry in Path(directory).glob("ranks/*"):
            try:
                os.killpg(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        end(lambda: children_of(server_pid), patience=0.0)
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # tearing down an interpreter full of torch takes 0.1 s


if SETUP_VARIABLE in os.environ:
    _prepare(**json.loads(os.environ.pop(SETUP_VARIABLE)))
