"""A run that is broken off: by Ctrl-C, by SIGTERM, by `pytest.exit`. What was running then, and how it ends.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType

import pytest

TEAR_DOWN_WITHIN = 5.0
"""Seconds that ranks get to tear down when the run is broken off; what still runs then is ended."""

BREAKS_OFF = (KeyboardInterrupt, pytest.exit.Exception)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What ran on ranks when the run was broken off."""

    world: str | None
    """Name of the world that ran a test, if one did."""
    ranks: dict[int, str]
    """What each of its ranks was doing, in one line."""
    complaints: list[str]
    """Which ranks did not tear down in time, or failed to."""

    def write(self, reporter: pytest.TerminalReporter, nodeid: str) -> None:
        """Tell it, with the test's node id, below the failures."""
        if not (self.ranks or self.complaints):
            return
        reporter.section("broken off on ranks", sep="-", yellow=True)
        if self.ranks:
            reporter.line(f"{nodeid} was running:")
        for rank, doing in sorted(self.ranks.items()):
            reporter.line(f"  rank {rank}: {doing}")
        for complaint in self.complaints:
            reporter.line(f"  {complaint.splitlines()[0]}")


class Termination:
    """Lets SIGTERM, which CI systems send, break off the run as Ctrl-C does, from `heed` to `restore`."""

    def __init__(self) -> None:
        self._heeds = False

    def heed(self) -> None:
        """Handle the signal, unless somebody else does already."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            controller = os.getpid()

            def break_off(number: int, frame: FrameType | None) -> None:
                if os.getpid() != controller:  # a test's fork: it dies of it, as it would without us
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)
                pytest.exit("SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

            signal.signal(signal.SIGTERM, break_off)
            self._heeds = True

    def restore(self) -> None:
        """Let the signal do what it did before."""
        if self._heeds:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._heeds = False
