"""Memory that tests have freed, which the allocator of a rank keeps. Runs inside a rank."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from contextlib import suppress

import pytest

GROWTH = 64 * 2**20
"""Bytes by which a rank has grown when it gives back what tests have freed."""


class FreedMemory:
    """Gives the memory that tests have freed back to the system.

    Of one test of a ResNet, 0.7 GB stayed with each rank to the end of the run.
    """

    def __init__(self) -> None:
        # Of glibc; other allocators give back by themselves.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._figures: int | None = None
        with suppress(OSError):  # not every system has the file
            self._figures = os.open("/proc/self/statm", os.O_RDONLY)
        self._before = self._resident()

    @pytest.hookimpl(trylast=True)
    def pytest_ranks_finished(self) -> None:
        """Give memory back if this process has grown; it costs 1 ms, and more where there is much."""
        if self._trim is not None and self._resident() > self._before + GROWTH:
            gc.collect()  # models are full of cycles
            self._trim(0)
            self._before = self._resident()

    def _resident(self) -> int:
        """Return the bytes of memory that this process holds, 0 where that is not known; 2 µs."""
        if self._figures is None:
            return 0
        return int(os.pread(self._figures, 100, 0).split()[1]) * mmap.PAGESIZE
