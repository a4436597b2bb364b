"""The handler of SIGTERM in the controller; standard library and pytest only."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest


class Termination:
    """Interrupts the run on SIGTERM, which CI systems send, as Ctrl-C does, from `handle` to `restore`."""

    def __init__(self) -> None:
        self._handles = False

    def handle(self) -> None:
        """Handle the signal, unless another handler is installed already."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            controller = os.getpid()

            def interrupt(number: int, frame: FrameType | None) -> None:
                if os.getpid() != controller:  # a test's fork: it dies of it, as it would without us
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)
                pytest.exit("SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

            signal.signal(signal.SIGTERM, interrupt)
            self._handles = True

    def restore(self) -> None:
        """Restore the signal's default action."""
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles = False
