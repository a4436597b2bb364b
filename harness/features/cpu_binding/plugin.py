"""The plugin of CPU binding: each rank runs on CPUs of its own, where an ini option asks for it.

A collective of gloo passes through three threads of each rank. The scheduler spreads them over all CPUs, and
to wake up one that sleeps takes longer than what the thread has to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.backends.device import Device
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession
    from lockstep.specification import RankSpec

_CHOICES = ("none", "exclusive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_cpu_binding",
        "CPUs that a rank without a GPU runs on: all (none), or its own if there are as many as ranks, or "
        "else those of its worker of pytest-xdist (exclusive)",
        default="none",
    )


def pytest_configure(config: pytest.Config) -> None:
    binding = config.getini("ranks_cpu_binding")
    if binding not in _CHOICES:
        raise pytest.UsageError(f"ranks_cpu_binding = {binding!r}: choose {', '.join(_CHOICES)}")
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None or binding == "none" or not hasattr(os, "sched_setaffinity"):
        return
    spec = session.rank.spec
    if Device(spec.key.device).is_cpu:
        bind(cpus_of(spec, os.sched_getaffinity(0)))


def cpus_of(spec: RankSpec, cpus: Iterable[int]) -> set[int]:
    """Return those of the CPUs of this process that a rank has to itself; if they are too few, its worker's.

    They are divided among the workers of pytest-xdist, and then among the ranks of a world. A worker that
    takes the place of another, or whose id the user has chosen, has no part, and its ranks have them all.
    """
    place, worker = spec.place, spec.session.workerinput
    rank, size = (spec.rank, spec.key.size) if place is None else (place.local_rank, place.local_size)
    own = sorted(cpus, key=lambda cpu: (_core(cpu), cpu))
    if worker["workerid"] != "master":
        number = re.fullmatch(r"gw(\d+)", worker["workerid"])
        own = _part(own, int(number[1]), worker["workercount"]) if number else []
    return set(_part(own, rank, size) or own or cpus)


def _part(cpus: list[int], number: int, count: int) -> list[int]:
    each = len(cpus) // count
    return cpus[number * each : (number + 1) * each]


def bind(cpus: set[int]) -> None:
    """Let all threads of this process run on these CPUs alone, and so those that they will start."""
    with suppress(OSError):  # not in every sandbox
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cpus)


def _core(cpu: int) -> int:
    """Return the first CPU of the core of this one."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:  # no such directory in some containers
        return cpu
    return int(re.split("[,-]", siblings)[0])
