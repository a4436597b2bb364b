"""What a test may change in its process and must not leave to the next one."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.rank.changes import State
from harness.rank.interpreter import InterpreterState

# Pytest's own, rewritten at every phase of every test, and what torch sets when it imports its compiler.
_NOT_STATE = {b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR"}


@dataclass(frozen=True, slots=True)
class RankState(State):
    """The state of a process that tests change in passing."""

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
            environ=_environ(),
            process_groups=frozenset(_groups()),
            interpreter=InterpreterState.capture(),
        )

    def restore(self) -> None:
        """Put the process back into this state, but for process groups."""
        now = RankState.capture()
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_mode)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self.cudnn_flags
        if now.default_device != self.default_device:
            torch.set_default_device(None if self.default_device.type == "cpu" else self.default_device)
        if now.deterministic_algorithms != self.deterministic_algorithms:  # the call imports torch's compiler
            enabled, warn_only = self.deterministic_algorithms
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if now.num_threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if now.cwd != self.cwd:
            os.chdir(self.cwd)
        _restore_environ(self.environ)
        if now.interpreter != self.interpreter:
            self.interpreter.restore()

    def end_groups(self) -> None:
        """Destroy the process groups that are not of this state.

        Not before every rank has ended the test: another one may still connect to the group.
        """
        for name, group in _groups().items():
            if name not in self.process_groups:
                dist.destroy_process_group(group)


def _groups() -> dict[str, dist.ProcessGroup]:
    """Return the living process groups of this rank by a readable name, the default one included."""
    if not dist.is_initialized():
        return {}
    # torch keeps no public list of groups.
    groups = dist.distributed_c10d._world.pg_map
    return {f"{group.group_desc} {group.group_name}": group for group in groups}


def forget_meshes() -> None:
    """Let no operator of DTensor answer with a mesh of this test, whose groups may be gone in the next one.

    An operator remembers what it returned for equal arguments, and meshes over different groups of the same
    ranks are equal.
    """
    if tensor := sys.modules.get("torch.distributed.tensor"):
        # What torch.distributed.tensor.debug does for this, whose import takes 2 s; releases of torch differ.
        with contextlib.suppress(AttributeError):
            tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"


def _environ() -> dict[bytes, bytes]:
    """Copy what is below `os.environ`: twice a test, and its own copy takes 20 times as long."""
    environ: dict[bytes, bytes] = dict(os.environ._data)  # type: ignore[attr-defined]
    for name in _NOT_STATE:
        environ.pop(name, None)
    return environ


def _restore_environ(environ: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - environ.keys() - _NOT_STATE:
        del os.environb[name]
    os.environb.update(environ)


def count_collectives() -> int:
    """Return how many collectives the default group has begun, -1 if it is gone or does not count."""
    group = dist.group.WORLD
    if group is None:
        return -1
    with contextlib.suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return -1


def count_groups() -> int:
    """Return how many groups this process has ever made: it names the next, so ranks must agree on it."""
    return int(dist.distributed_c10d._world.group_count)
