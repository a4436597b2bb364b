"""A process that the server forked, watched by the controller whether the server lives or not.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

UNKNOWN = 255
"""What multiprocessing takes for the exit code when the server is gone, and nobody can tell it."""


class ServedProcess:
    """A process as its grandparent sees it: the part of `multiprocessing.Process` that a world uses.

    multiprocessing learns of its end from the server, and takes the end of the server for that of every
    process it has forked. The kernel knows better where it has descriptors of processes (Linux since 5.3).
    """

    def __init__(self, process: BaseProcess, has_server: Callable[[], bool]) -> None:
        self._process = process
        self._has_server = has_server
        self._descriptor: int | None = None
        self.pid = process.pid
        self.sentinel = process.sentinel
        if hasattr(os, "pidfd_open") and process.pid is not None:
            try:
                self._descriptor = self.sentinel = os.pidfd_open(process.pid)
            except OSError:  # it has ended already: then the server knows its exit code
                return
            weakref.finalize(self, os.close, self._descriptor)

    def is_alive(self) -> bool:
        return not wait([self.sentinel], 0)

    def join(self, timeout: float | None = None) -> None:
        """Wait `timeout` seconds at most for its end, and for the server to tell its exit code."""
        if wait([self.sentinel], timeout):
            self._process.join(1.0)

    @property
    def exitcode(self) -> int | None:
        """Its exit code; None while it lives, and where only a server that is gone could tell."""
        if self.is_alive():
            return None
        code = self._process.exitcode
        return None if code == UNKNOWN and not self._has_server() else code

    def kill(self) -> None:
        if self._descriptor is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and has been waited for
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
