"""The start of processes of the contexts spawn and forkserver, by the server that ranks are forked from.

Runs in the controller while a test runs there, and in the processes that were started so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.features.spawn.child import Program, Server, Setup
from lockstep.features.spawn.multiprocessing_internals import (
    ForkedPopen,
    TooManyDescriptors,
    start_new_interpreter,
    target_of,
)
from lockstep.features.spawn.process_state import ProcessState, differing_variable
from lockstep.features.spawn.torch_internals import function_of, index_of

_REFUSED = (ConnectionError, EOFError, FileNotFoundError, AuthenticationError)
"""Ways in which the server does not answer: it has ended, or been replaced."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started in the place of one of multiprocessing."""

    process: BaseProcess
    target: str
    """Name of the function that it runs."""
    index: int | None
    """Number of the process in its call of `spawn`; None where it is of none."""
    why_not: str = ""
    """Reason why it is a new interpreter after all, and no fork of the server."""

    @classmethod
    def of(cls, process: BaseProcess, why_not: str = "") -> Started:
        """Return what is known of a process, which is being started."""
        target, args = target_of(process)
        function = function_of(target, args)
        name = getattr(function, "__qualname__", "") or type(function).__name__
        return cls(process, f"`{name}`" if target else "`run`", index_of(target, args), why_not)


class Starter:
    """Starts processes for one process.

    Args:
        server: what they are forked from.
        observe: called with each process that has started.
        rewritten: returns the names of modules of which pytest has rewritten the asserts.
        awaited: called with pid and sentinel before the process waits without a limit for one of them.
    """

    def __init__(
        self,
        server: Server,
        observe: Callable[[Started], None] = lambda started: None,
        rewritten: Callable[[], tuple[str, ...]] = tuple,
        awaited: Callable[[int, int], None] = lambda pid, sentinel: None,
    ) -> None:
        self.server = server
        self._rewritten = rewritten
        self._observe = observe
        self.awaited = awaited
        self._lock = threading.Lock()
        self._lifeline: tuple[int, int, int] | None = None
        """The pid of this process, and both ends of a pipe that its end closes."""

    def start(self, process: BaseProcess, method: str) -> Any:
        """Start a process; return what `multiprocessing` has as its `Popen`."""
        why_not = self._why_not()
        if not why_not:
            try:
                popen = ForkedPopen(process, method, self)
            except (*_REFUSED, TooManyDescriptors) as error:
                why_not = str(error) or "the server has ended"
            else:
                self._observe(Started.of(process))
                return popen
        popen = start_new_interpreter(process)
        self._observe(Started.of(process, why_not))
        return popen

    def _why_not(self) -> str:
        name = differing_variable(os.environ, self.server.environ)
        return f"{name} was changed, which a new interpreter reads as it starts" if name else ""

    @property
    def key(self) -> bytes | None:
        """The key of the server."""
        return self.server.key

    # What a new process gets

    def descriptors(self) -> list[int]:
        """Return stdout, stderr, and the pipe that ends with this process."""
        with self._lock:
            if self._lifeline is None or self._lifeline[0] != os.getpid():  # a fork has its own
                self._lifeline = os.getpid(), *os.pipe()
        return [1, 2, self._lifeline[1]]

    def close(self) -> None:
        """Close the pipe: for the processes that were started, this one has ended."""
        with self._lock:
            if self._lifeline is not None and self._lifeline[0] == os.getpid():
                for each in self._lifeline[1:]:
                    os.close(each)
            self._lifeline = None

    def setup(self, method: str) -> Setup:
        """Return what makes a fork of the server ready."""
        return Setup(ProcessState.capture(), self.server, os.getpid(), method, self._rewritten())

    def program(self, process: BaseProcess, method: str) -> Program:
        """Return what runs there."""
        return Program(process, method)

    def began(self, pid: int) -> None:
        """Keep the controller from taking the process for one that a rank has left behind."""
        with contextlib.suppress(OSError):
            self._file_of(pid).touch()

    def ended(self, pid: int, exitcode: int) -> None:
        """Forget the process."""
        with contextlib.suppress(OSError):
            self._file_of(pid).unlink()

    def _file_of(self, pid: int) -> Path:
        return Path(self.server.directory, "ranks", str(pid))
