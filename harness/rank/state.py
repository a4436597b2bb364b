"""The state of a process that a test may change and must not leave to the next one. Runs inside a rank."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import locale
import os
import random
import resource
import signal
import sys
from _signal import getsignal  # type: ignore[import-not-found]  # no enum for each answer: 7 µs of 18
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist

from lockstep.backends.device import CPU, Device
from lockstep.rank.torch_internals import process_groups, set_cudnn_flags

# Snapshots and their differences


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State at one moment; the names of its fields are shown in messages."""

    def changes(self, now: Self) -> list[str]:
        """Return a line for each field in which `now` differs from this state."""
        lines: list[str] = []
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if isinstance(before, Snapshot):
                lines += before.changes(after)
            elif before != after:
                lines.append(_describe(field.name.replace("_", " "), before, after))
        return [line for line in lines if line]

    def with_changes(self, before: Self, now: Self) -> Self:
        """Return this state with what differs between the two others."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(now, field.name)
            if old != new:
                changes[field.name] = _fold(getattr(self, field.name), old, new)
        return replace(self, **changes)


def _describe(name: str, before: Any, after: Any) -> str:
    match before:
        case dict():
            changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
            return f"{name}: {', '.join(sorted(map(os.fsdecode, changed)))}"
        case frozenset():
            if any(group.startswith("default_pg") for group in before - after):
                return "no default process group (the next test gets a new world)"
            # A mesh makes groups and has no way to destroy them: its groups are not reported.
            left = [group for group in after - before if not group.startswith("mesh")]
            return f"{len(left)} process group(s)" if left else ""
        case tuple() if name == "sys path":
            new, gone = [p for p in after if p not in before], [p for p in before if p not in after]
            words = [*(f"{path} added" for path in new), *(f"{path} removed" for path in gone)]
            # Another order alone is no line: pytest makes one as it sets up a package.
            return f"{name}: {', '.join(words)}" if words else ""
        case str() if name == "locale":
            return f"{name}: {'; '.join(sorted({*after.split(';')} - {*before.split(';')}))}"
        case _:
            return f"{name}: {after} (was {before})"


def _fold(value: Any, old: Any, new: Any) -> Any:
    """Apply to a value the difference between two others: item by item where it is a collection."""
    match value:
        case Snapshot():
            return value.with_changes(old, new)
        case dict():
            kept = {key: item for key, item in value.items() if key not in old or key in new}
            return kept | {key: item for key, item in new.items() if old.get(key) != item}
        case frozenset():
            return (value - (old - new)) | (new - old)
        case _:
            return new


# The interpreter and its process

# Not SIGCHLD: torch's DataLoader sets a handler once, for good.
_SIGNALS = {
    f"SIG{name}": signal.Signals[f"SIG{name}"] for name in ("HUP", "INT", "ALRM", "TERM", "USR1", "USR2")
}
# Low limits break what comes later; the others are hardly set in a test.
_LIMITS = {
    name: getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU")
}


@dataclass(frozen=True, slots=True)
class InterpreterState(Snapshot):
    """The state of an interpreter and its process."""

    signal_handlers: dict[str, Any]
    blocked_signals: dict[str, int]
    pending_alarm: bool
    """True if SIGALRM will come: it would kill some later test."""
    faulthandler: bool
    """Restored by `CrashReports`, which knows the file."""
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
            signal_handlers={name: getsignal(number) for name, number in _SIGNALS.items()},
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
        """Put the process into this state again, except for a hard limit that only root may raise."""
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
            soft, hard = resource.getrlimit(_LIMITS[name])
            if (soft, hard) != limits:
                try:
                    resource.setrlimit(_LIMITS[name], limits)
                except (ValueError, OSError):  # only root may raise a hard limit
                    with contextlib.suppress(ValueError, OSError):
                        resource.setrlimit(_LIMITS[name], (hard, hard))
        locale.setlocale(locale.LC_ALL, self.locale)


def _is_vendored(path: str) -> bool:
    """Whether setuptools added the path when it was imported, to import the rest of itself from there."""
    return path.endswith("_vendor")


class CrashReports:
    """The stacks that a rank writes on SIGUSR1, when it cannot answer, and before it dies of a signal.

    Python's fault handler as the harness needs it, however a test has left it.

    Args:
        stacks_path: where the controller looks for the stacks of a rank that it has sent SIGUSR1.
    """

    def __init__(self, stacks_path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._stacks = os.open(stacks_path, flags, 0o600)
        self._stderr = os.dup(2)  # not what pytest captures, which dies with the rank

    def enable(self) -> None:
        """Set both handlers, also where something else has taken the signal since."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._stderr)


# Everything

# Pytest's own, rewritten at every phase of every test, and what torch sets when it imports its compiler,
# or compiles for a GPU.
_NOT_STATE = {b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_PTXAS_PATH"}


@dataclass(frozen=True, slots=True)
class RankState(Snapshot):
    """The state of a rank: of torch, of the process and of its interpreter."""

    default_dtype: torch.dtype
    default_device: torch.device
    grad_mode: bool
    deterministic_algorithms: tuple[bool, bool]
    cudnn_flags: tuple[bool, bool]
    num_threads: int
    cwd: str
    environ: dict[bytes, bytes]
    process_groups: frozenset[str]
    interpreter: InterpreterState

    @classmethod
    def capture(cls) -> RankState:
        # Twice a test; `os.environ.copy()` takes 20 times as long.
        environ: dict[bytes, bytes] = dict(os.environ._data)  # type: ignore[attr-defined]
        for name in _NOT_STATE:
            environ.pop(name, None)
        return cls(
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            grad_mode=torch.is_grad_enabled(),
            deterministic_algorithms=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            cudnn_flags=(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
            num_threads=torch.get_num_threads(),
            cwd=_cwd(),
            environ=environ,
            process_groups=frozenset(_groups()),
            interpreter=InterpreterState.capture(),
        )

    def restore(self) -> None:
        """Put the process into this state again, except for process groups."""
        now = RankState.capture()
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_mode)
        set_cudnn_flags(*self.cudnn_flags)
        if now.default_device != self.default_device:
            torch.set_default_device(None if self.default_device.type == "cpu" else self.default_device)
        if now.deterministic_algorithms != self.deterministic_algorithms:  # the call imports torch's compiler
            enabled, warn_only = self.deterministic_algorithms
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if now.num_threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if now.cwd != self.cwd:
            os.chdir(self.cwd)
        for name in os.environb.keys() - self.environ.keys() - _NOT_STATE:
            del os.environb[name]
        os.environb.update(self.environ)
        if now.interpreter != self.interpreter:
            self.interpreter.restore()

    def end_groups(self) -> list[dist.ProcessGroup]:
        """Destroy the process groups that are not of this state.

        Call it when every rank has ended the test: before that, another one may still connect to the group.

        Returns:
            those of gloo, which torch does not know any more, for the caller to drop the last references to.
        """
        groups = [group for name, group in _groups().items() if name not in self.process_groups]
        if dist.group.WORLD in groups:  # of a world that starts without one; all others end with it
            dist.destroy_process_group()
            return []
        of_gloo = [group for group in groups if dist.get_backend(group) == "gloo"]
        for group in groups:
            dist.destroy_process_group(group)
        return of_gloo


def _groups() -> dict[str, dist.ProcessGroup]:
    """Return the living process groups of this rank by a readable name, the default one included."""
    if not dist.is_initialized():
        return {}
    return {f"{group.group_desc} {group.group_name}": group for group in process_groups()}


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed random, numpy's legacy generator, and torch's generators of the CPU and of the rank's device.

    Not by `torch.manual_seed`: it also queues a seed for every kind of device that was never used.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type != CPU:
        Device(device.type).seed(seed)
