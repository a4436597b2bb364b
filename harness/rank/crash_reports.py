"""What a rank writes when it cannot speak any more: stacks on SIGUSR1, and before it dies of a signal."""

from __future__ import annotations

import faulthandler
import os
import signal


class CrashReports:
    """Python's fault handler, as the harness needs it, however a test has left it.

    Args:
        stacks_path: where the controller looks for the stacks of a rank that it has sent SIGUSR1.
    """

    def __init__(self, stacks_path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._stacks = os.open(stacks_path, flags, 0o600)
        self._stderr = os.dup(2)  # not what pytest captures, which dies with the rank

    def enable(self) -> None:
        """Put both handlers in place, also where something else has taken the signal meanwhile."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._stderr)
