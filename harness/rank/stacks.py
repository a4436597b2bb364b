"""Stacks of all Python threads of this process, while they run."""

from __future__ import annotations

import faulthandler
import os
import threading

from harness.tracebacks import Stack, parse


class Stacks:
    """Takes stacks by Python's fault handler.

    Not by frame objects: on Python 3.11 the next frame of one that runs in another thread was seen to be a
    dict, and to crash the process, while torch's autograd engine was at work there.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("lockstep-stacks")
        self._taking = threading.Lock()

    def take(self) -> dict[int, Stack]:
        """Return the stack of each thread, by its ident."""
        with self._taking:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            faulthandler.dump_traceback(self._file, all_threads=True)
            text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return {thread.ident: thread.stack for thread in parse(text.decode(errors="replace"))}
