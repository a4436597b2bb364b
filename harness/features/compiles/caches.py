"""The compile caches of a rank: a directory that no other rank, and no other run, uses at the same time.

Runs in a rank. A directory is for one rank of one size of world, one torch and one kind of machine; it is
leased when the rank first compiles, by a lock that the kernel takes back when the process ends.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.features.compiles.torch_internals import TRACE, remember_probes

if TYPE_CHECKING:
    from lockstep.specification import RankSpec

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
OTHERS = {"TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}
"""Variables of caches with locks of their own: several processes may use one. What the user has set stays."""
LEASE = ".lockstep-lease"
"""End of the name of a directory's lock, which a rank keeps open; no leak of a test."""
_CPU_BYTES = 1 << 14
"""Number of bytes of /proc/cpuinfo that are read: the first processor's."""


class RankCaches(logging.Handler):
    """Sets the directories of a rank, and leases its own at the first record of torch's trace.

    Args:
        directory: that keeps the caches of all ranks; empty for none that is kept.
        spec: of the rank.
        compiles: called at the first record, too.
    """

    def __init__(self, directory: str, spec: RankSpec, compiles: Callable[[], None]) -> None:
        super().__init__()
        self._compiles = compiles
        kept = Path(directory) if directory and _may_write(Path(directory)) else None
        self._machine = kept / machine() if kept else None
        own = self._machine / f"world-{spec.key.size}" / f"rank-{spec.rank}" if self._machine else None
        self.path = own or Path(spec.directory, f"rank-{spec.rank}.caches")
        """Directory of the rank, unless another run has it then."""
        self._private = Path(spec.directory, f"rank-{spec.rank}.caches")
        self._locked = -1

    def install(self) -> None:
        """Set the variables of this process, and wait for the first compilation."""
        os.environ[INDUCTOR] = str(self.path / "inductor")
        for name, folder in OTHERS.items():
            os.environ.setdefault(name, str(self.path / folder))
        TRACE.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Lease the directory: this process is about to compile."""
        TRACE.removeHandler(self)
        if self._locked == -1 and os.environ.get(INDUCTOR) == str(self.path / "inductor"):
            os.environ[INDUCTOR] = str(self._lease() / "inductor")
        if self._machine is not None:
            remember_probes(functools.partial(remembered, self._machine / "cpu"))
        self._compiles()

    def _lease(self) -> Path:
        """Return the first of this rank's directories that no other process has leased."""
        try:
            for number in itertools.count():
                path = self.path if not number else self.path.with_name(f"{self.path.name}.{number}")
                path.mkdir(parents=True, exist_ok=True)
                lock = os.open(f"{path}{LEASE}", os.O_RDWR | os.O_CREAT, 0o666)
                if _lock(lock):
                    self._locked = lock
                    return path
                os.close(lock)
        except OSError as error:
            why = f"{self.path}: {error.strerror}; what this rank compiles is not kept"
            warnings.warn(f"--compile-cache: cannot use {why}", stacklevel=1)
        return self._private


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _may_write(path: Path) -> bool:
    """Whether a directory, or the one that it would be made in, takes new files."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def machine() -> str:
    """Return a name for this torch, Python and kind of processor: code for another may crash here."""
    features = [platform.machine()]
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = file.read(_CPU_BYTES).decode(errors="replace").splitlines()
        features += [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    except OSError:  # another system: the machine's name says enough
        pass
    digest = hashlib.sha256("\n".join(features).encode()).hexdigest()[:8]
    python = ".".join(map(str, sys.version_info[:2]))
    return f"torch-{torch.__version__}-python-{python}-{digest}"


def remembered(directory: Path, name: str, probe: Callable[[], bool]) -> bool:
    """Return whether a probe of the processor has succeeded here before, in any rank; else run it.

    One rank runs it, and the others wait. A failure is not kept: a busy machine may have caused it.
    """
    path = directory / hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) > 0:
                return True
            succeeded = probe()
            if succeeded:
                file.write(b"succeeded\n")
            return succeeded
    except OSError:
        return probe()
