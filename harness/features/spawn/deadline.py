"""The time that a call of `spawn` has, and the join of a process. Runs in the controller.

`spawn` and `join` know no deadline. A test that takes long must not fail by adoption, and one that hangs must
end soon: without `--world-timeout`, time runs while no process computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lockstep.options import DEFAULTS
from lockstep.process_tree import stat_of, with_descendants

WITHIN = 300.0
"""Seconds after which even processes that compute are ended, without `--world-timeout`."""
LOOK_EVERY = 1.0
"""Seconds between looks at what processes have computed."""
_COMPUTES = 0.1
"""Part of a processor from which on processes compute: those that wait for each other use a hundredth."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without progress, and in all."""

    idle: float
    total: float

    @classmethod
    def read(cls, config: pytest.Config) -> Limits:
        """Return `--world-timeout` for both; without it its default, and `WITHIN`."""
        chosen: float = config.getoption("world_timeout")
        return cls(chosen, WITHIN if chosen == DEFAULTS["world_timeout"] else chosen)


class Deadline:
    """The deadline of processes that have just begun.

    Args:
        pids: returns the processes; what is below them counts, too.
    """

    def __init__(self, limits: Limits, pids: Callable[[], set[int]]) -> None:
        self._limits = limits
        self._pids = pids
        self._computed: float | None = None
        self._began = self._looked = self._progress = time.monotonic()

    def moment(self) -> float:
        """Return when time is over (monotonic), as far as is known; look at the processes now and then."""
        now, limits = time.monotonic(), self._limits
        if limits.idle < limits.total and (since := now - self._looked) >= LOOK_EVERY:
            computed = processor_time(self._pids())
            if self._computed is not None and abs(computed - self._computed) >= _COMPUTES * since:
                self._progress = now  # less than before, where one has ended
            self._computed, self._looked = computed, now
        return min(self._progress + limits.idle, self._began + limits.total)

    def seconds(self) -> float:
        """Return for how long the processes run, and may run yet."""
        return self.moment() - self._began


def processor_time(pids: set[int]) -> float:
    """Return the seconds for which processes and those below them have run, ended children included."""
    ticks = 0
    for pid in with_descendants(pids):
        ticks += sum(
            map(int, stat_of(pid)[11:15])
        )  # utime, stime and those of children, see proc_pid_stat(5)
    return ticks / os.sysconf("SC_CLK_TCK")
