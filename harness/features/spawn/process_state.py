"""The state that a process hands on to one that it starts, besides memory: captured here, taken over there.

Used in the process that starts another and in the new one, which is a fork of the server.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TORCH", "PYTORCH_")
"""Beginnings of variables that Python, torch or a library of it reads once, as it starts or is imported.

Not of OpenBLAS: it has one thread in the server, which could not be forked otherwise.
"""
READ_LATER = (
    *("PYTHONPATH", "PYTHONBREAKPOINT", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_"),
    *("TORCHELASTIC_", "TORCH_MP_PARALLEL_START", "TORCH_FR_", "TORCH_GLOO_", "PYTORCH_TESTING_"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_HOME"),
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in its own process as it first compiles
)
"""Beginnings of those among them that are read when they are used, or that are applied by `child.begin`."""
_LIMITS = tuple(f"RLIMIT_{name}" for name in ("CORE", "CPU", "FSIZE", "DATA", "STACK", "NOFILE", "AS"))


def differing_variable(own: Mapping[str, str], of_server: Mapping[str, str]) -> str:
    """Return the name of a variable that a fork of the server has read before it changed; "" for none."""
    for name in sorted({*own, *of_server}):
        read_early = name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
        if read_early and own.get(name) != of_server.get(name):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The part of a process that the kernel hands on to a program which it starts."""

    environ: dict[str, str]
    ignored: tuple[int, ...]
    """Signals that it ignores."""
    blocked: tuple[int, ...]
    umask: int
    processors: tuple[int, ...]
    limits: dict[str, tuple[int, int]]

    @classmethod
    def capture(cls) -> ProcessState:
        """Return the state of this process."""
        return cls(
            environ=dict(os.environ),
            ignored=tuple(int(each) for each in _signals() if signal.getsignal(each) is signal.SIG_IGN),
            blocked=tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            umask=_umask(),
            processors=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
            limits={name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        )

    def take_over(self) -> None:
        """Give this process that state; it has one thread."""
        os.environ.clear()
        os.environ.update(self.environ)
        for each in _signals():
            ignores = int(each) in self.ignored
            signal.signal(each, signal.SIG_IGN if ignores else _default_handler(each))
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.umask(self.umask)
        with contextlib.suppress(OSError):  # the set of processors has been cut since
            if self.processors and self.processors != tuple(sorted(os.sched_getaffinity(0))):
                os.sched_setaffinity(0, self.processors)
        for name, limit in self.limits.items():
            if resource.getrlimit(number := getattr(resource, name)) != limit:
                with contextlib.suppress(ValueError, OSError):  # a hard limit that was raised by root
                    resource.setrlimit(number, limit)


def _signals() -> list[signal.Signals]:
    fixed = (signal.SIGKILL, signal.SIGSTOP)
    return [each for each in signal.Signals if each not in fixed]


def _default_handler(number: signal.Signals) -> Any:
    if number is signal.SIGINT:
        return signal.default_int_handler
    # Python itself ignores these two, in each interpreter.
    return signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL


def _umask() -> int:
    """Return the umask; without a moment in which another thread would see another one."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def is_line_buffered(descriptor: int) -> bool:
    """Return whether Python makes a line-buffered stream of a descriptor."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def reopen_streams(stdout: int, stderr: int) -> None:
    """Let this process write where the descriptors lead."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=is_line_buffered(1))
