"""Traces a recorded run of `benchmarks/power.py`: which lines of the mutated folder run, and for which claim.

Every interpreter with this folder in PYTHONPATH imports it as it starts, and its forks go on: what a test
starts is recorded as the self-test itself. What runs at import is not.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

RECORD, SOURCE, ITEM = (f"LOCKSTEP_CLAIMS_{name}" for name in ("RECORD", "SOURCE", "ITEM"))


class Tracer:
    """Adds each line, the first time that a process runs it for an item, to a file of that process.

    It is closed in between, as tests count open descriptors, and nothing is kept back, as many are killed.
    """

    def __init__(self, folder: str, source: str) -> None:
        self.folder = folder
        root, _, below = source.partition("/harness")
        self.prefixes = tuple(f"{root}/{name}{below}/" for name in ("harness", "lockstep"))
        self.running: tuple[int, str] = (0, "")
        self.seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefixes) or code.co_name == "<module>":
            return None
        running = os.getpid(), os.environ.get(ITEM, "")
        if running != self.running:
            self.running = running
            self.seen = set()
            self.write(f"@{running[1]}\n")
        return self.line if running[1] else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        where = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and where not in self.seen:
            self.seen.add(where)
            prefix = next(each for each in self.prefixes if where[0].startswith(each))
            self.write(f"{where[0].removeprefix(prefix)}:{where[1]}\n")
        return self.line

    def write(self, text: str) -> None:
        try:
            file = os.open(f"{self.folder}/{self.running[0]}.lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, text.encode())
            os.close(file)
        except OSError:  # a test that allows no more descriptors
            pass


if RECORD in os.environ:
    tracer = Tracer(os.environ[RECORD], os.environ[SOURCE])
    threading.settrace(tracer)
    sys.settrace(tracer)
