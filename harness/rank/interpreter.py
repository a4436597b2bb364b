"""What a test may change in Python and in what the system keeps for its process. Standard library only."""

from __future__ import annotations

import faulthandler
import gc
import locale
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from harness.rank.changes import State

# Not SIGCHLD: torch's DataLoader sets a handler once, for good.
_SIGNALS = [signal.Signals[f"SIG{name}"] for name in ("HUP", "INT", "ALRM", "TERM", "USR1", "USR2")]
# Low limits break what comes later; the others are hardly set in a test.
_LIMITS = {
    name: getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU")
}


@dataclass(frozen=True, slots=True)
class InterpreterState(State):
    """The state of an interpreter and its process."""

    signal_handlers: dict[str, Any]
    blocked_signals: dict[str, int]
    pending_alarm: bool
    """Whether SIGALRM will come: it would kill some later test."""
    faulthandler: bool
    """Put back by `CrashReports`, which knows the file."""
    garbage_collection: bool
    recursion_limit: int
    sys_path: tuple[str, ...]
    umask: str
    resource_limits: dict[str, tuple[int, int]]
    locale: str

    @classmethod
    def capture(cls) -> InterpreterState:
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            signal_handlers={number.name: signal.getsignal(number) for number in _SIGNALS},
            blocked_signals={str(number): number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())},
            pending_alarm=signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            faulthandler=faulthandler.is_enabled(),
            garbage_collection=gc.isenabled(),
            recursion_limit=sys.getrecursionlimit(),
            sys_path=tuple(path for path in sys.path if not _is_vendored(path)),
            umask=f"{umask:#o}",
            resource_limits={name: resource.getrlimit(limit) for name, limit in _LIMITS.items()},
            locale=locale.setlocale(locale.LC_ALL, None),
        )

    def restore(self) -> None:
        """Put the process back into this state, as far as the system lets it: a hard limit stays lowered."""
        if not self.pending_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for name, handler in self.signal_handlers.items():
            if handler is not None and signal.getsignal(signal.Signals[name]) != handler:
                signal.signal(signal.Signals[name], handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals.values())
        (gc.enable if self.garbage_collection else gc.disable)()
        sys.setrecursionlimit(self.recursion_limit)
        sys.path[:] = [*self.sys_path, *filter(_is_vendored, sys.path)]
        os.umask(int(self.umask, 8))
        for name, limits in self.resource_limits.items():
            _restore_limit(_LIMITS[name], limits)
        locale.setlocale(locale.LC_ALL, self.locale)


def _is_vendored(path: str) -> bool:
    """Whether setuptools has put it there as it was imported, to import the rest of itself from."""
    return path.endswith("_vendor")


def _restore_limit(limit: int, limits: tuple[int, int]) -> None:
    soft, hard = resource.getrlimit(limit)
    if (soft, hard) == limits:
        return
    try:
        resource.setrlimit(limit, limits)
    except (ValueError, OSError):  # only root may raise a hard limit
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (hard, hard))
