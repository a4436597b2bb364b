"""Files by which the controller learns why a process failed: its exception as pytest shows it, its stack.

Runs in processes of tests. Both are files of the controller's directory, named after the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.features.spawn.multiprocessing_internals import BOOTSTRAP
from lockstep.features.spawn.torch_internals import code_of_wrap
from lockstep.tracebacks import is_installed

_HERE = str(Path(__file__).parent)
_ABOVE = ("/multiprocessing/process.py", "/torch/multiprocessing/spawn.py")
"""Ends of the files of which frames stand above the function of a process."""


def stacks_path(directory: str, pid: int) -> Path:
    """Return where a process writes its stacks when it is terminated; the file is there while it lives."""
    return Path(directory, "spawned", f"{pid}.stacks")


def failure_path(directory: str, pid: int) -> Path:
    """Return where a process writes the report of the exception that ends it."""
    return Path(directory, "spawned", f"{pid}.failure")


def record_failures(directory: str) -> None:
    """Have this process write both, whatever it is ended by but SIGKILL."""
    path = stacks_path(directory, os.getpid())
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    # In the kernel's order: Python's own handlers wait while the process waits in a collective.
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    # Both are called where multiprocessing, and torch, end a process by its exception.
    for name in ("format_exc", "print_exc"):
        setattr(traceback, name, _recording(getattr(traceback, name), directory, (BOOTSTRAP, code_of_wrap())))


def _recording(
    original: Callable[..., Any], directory: str, callers: tuple[object, ...]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code in callers:
            with contextlib.suppress(
                Exception
            ):  # of a repr of the user's, say: multiprocessing reports it, too
                _write(directory)
        return original(*args, **kwargs)

    return call


def _write(directory: str) -> None:
    """Write the report of the exception under way: at first without source lines, which take a while.

    The other processes of a call of `spawn` are terminated as soon as one has ended.
    """
    import pytest

    excinfo, now = pytest.ExceptionInfo.from_current(), time.time()
    path = failure_path(directory, os.getpid())
    _save(path, now, excinfo.getrepr(style="native", tbfilter=only_of_user))
    _save(path, now, excinfo.getrepr(style="long", tbfilter=from_the_function_on))


def _save(path: Path, at: float, text: Any) -> None:
    import pytest

    from lockstep.rank.pytest_internals import serialise_report
    from lockstep.rank.reporter import sanitise

    report = pytest.TestReport("", ("", None, ""), {}, "failed", text, "call", start=at, stop=at)
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(sanitise(serialise_report(report))))
    partial.rename(path)


def from_the_function_on(excinfo: Any) -> Any:
    """Return the traceback from the function of the process on, without hidden frames.

    Frames of installed packages, and those in the middle, are shown in short.
    """
    entries = excinfo.traceback
    ours = [i for i, each in enumerate(entries) if str(each.path).startswith(_HERE)]  # in a rank
    above = next((i for i, each in enumerate(entries) if not str(each.path).endswith(_ABOVE)), 0)
    shown = entries[ours[-1] + 1 if ours else above :].filter(excinfo)
    last = len(shown) - 1
    return type(shown)(
        each if i in (0, last) and not is_installed(str(each.path)) else each.with_repr_style("short")
        for i, each in enumerate(shown)
    )


def only_of_user(excinfo: Any) -> Any:
    """Return the traceback without frames of installed packages."""
    return excinfo.traceback.filter(lambda each: not is_installed(str(each.path)))
