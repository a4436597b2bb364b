"""The first and the last steps of a process that the server has forked for a test. Runs in that process.

It is to find what a new interpreter would: the server's own state goes, that of the process which has started
it comes. Standard library only, beside what the server has imported.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.features.spawn.failure import record_failures
from lockstep.features.spawn.multiprocessing_internals import (
    bootstrap,
    flush_streams,
    inherited_descriptors,
    start_processes_by,
)
from lockstep.features.spawn.process_state import ProcessState, reopen_streams
from lockstep.features.spawn.pytest_internals import rewrite_asserts_of
from lockstep.features.spawn.torch_internals import replace_parent_death_signal
from lockstep.launch.multiprocessing_internals import close_server_pipe

_HOOKS = ("sitecustomize", "usercustomize")
"""Modules that Python runs as an interpreter starts."""
_COVERAGE_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


@dataclass(frozen=True, slots=True)
class Server:
    """The server, as processes need to know it that have others forked from it."""

    directory: str
    """Directory of the controller, in which its processes have a file each."""
    environ: dict[str, str]
    """Variables of the environment that the server was started with."""
    key: bytes | None = field(repr=False)
    """The key of its socket; None before Python 3.14."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The part of a process that the one it starts gets; unpickling it makes the new process ready."""

    state: ProcessState
    server: Server
    parent: int
    """Pid of the process that starts it."""
    method: str
    """Start method, spawn or forkserver."""
    rewritten: tuple[str, ...]
    """Names of modules of which pytest rewrites the asserts."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return begin, (self.state, self.server, self.parent, self.method, self.rewritten)


def begin(state: ProcessState, server: Server, parent: int, method: str, rewritten: tuple[str, ...]) -> None:
    """Make a fork of the server what a new process would be. The arguments are those of `Setup`."""
    from lockstep.features.spawn.starter import Starter

    close_server_pipe()
    ready, stdout, stderr, lifeline = inherited_descriptors()[:4]
    reopen_streams(stdout, stderr)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.excepthook = sys.__excepthook__
    state.take_over()
    with contextlib.suppress(OSError):  # the controller is gone, with its directory
        record_failures(server.directory)
    os.close(ready)
    gc.enable()
    gc.unfreeze()
    _seed_generators()
    _apply_variables(state)
    _report_parent(parent, lifeline)
    replace_parent_death_signal(lambda number: send_at_end_of(lifeline, number))
    start_processes_by(Starter(server, rewritten=lambda: rewritten).start)
    rewrite_asserts_of(rewritten)
    if method == "spawn":
        _run_startup_hooks()


@dataclass(frozen=True, slots=True)
class Program:
    """A process object, and the end of an interpreter after it where one would end."""

    process: BaseProcess
    method: str

    def _bootstrap(self, parent_sentinel: int) -> int:
        code = bootstrap(self.process, parent_sentinel)
        if self.method == "spawn":  # a fork of multiprocessing's server runs none of these
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            with contextlib.suppress(OSError, ValueError):
                flush_streams()
        return code


def send_at_end_of(lifeline: int, number: int) -> None:
    """Have the kernel send this process a signal when the process ends that has started it.

    `PR_SET_PDEATHSIG` would wait for the end of the server.

    Args:
        lifeline: a pipe of which that process alone has the other end.
    """
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)  # one owner each
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, number)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if is_over(lifeline):
        os.kill(os.getpid(), number)


_F_SETSIG = 10  # <linux/fcntl.h>; `fcntl` has no name for it in Python 3.11


def is_over(lifeline: int) -> bool:
    """Return whether the process at the other end of a pipe, to which it writes nothing, has ended."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))


def _report_parent(parent: int, lifeline: int) -> None:
    """Let `os.getppid` name the process that has started this one, and not the server."""
    os.getppid = lambda: 1 if is_over(lifeline) else parent


def _seed_generators() -> None:
    """Seed what has the state of the server, as each new interpreter does; `random` does so after a fork."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _apply_variables(state: ProcessState) -> None:
    """Do what torch does with variables as it is imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    threads = state.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    if "TORCH_DISTRIBUTED_DEBUG" in state.environ and (distributed := sys.modules.get("torch.distributed")):
        distributed.set_debug_level_from_env()


def _run_startup_hooks() -> None:
    """Run what each interpreter runs as it starts, with the environment that it has now."""
    for name in _HOOKS:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None:
            with contextlib.suppress(Exception):  # as `site` does, which reports it once
                runpy.run_path(path, run_name=name)
    if any(name in os.environ for name in _COVERAGE_VARIABLES):
        with contextlib.suppress(ImportError):
            import coverage

            started = coverage.process_startup()
            if sys.version_info >= (3, 13):
                # That of the server goes on, and what saves it at the end has been cleared in this fork.
                if started is None and (measuring := coverage.Coverage.current()):
                    atexit.register(measuring.save)
