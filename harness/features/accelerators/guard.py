"""The guard of a rank's accelerator: each test waits for its own work there, and answers for its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
from torch.backends import cuda

from lockstep.backends.device import AUTOCAST, Device
from lockstep.exceptions import RankStateWarning
from lockstep.features.accelerators.torch_internals import float32_precision, set_float32_precision
from lockstep.hookspecs import Ending
from lockstep.rank.state import Snapshot

__tracebackhide__ = True

_ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
"""The implementations of `scaled_dot_product_attention`: the getter and setter of each switch."""


class AcceleratorGuard:
    """Waits for what tests have queued, restores how torch computes, and gives up a rank with a lost device.

    Kernels run behind the test that queues them: a later test would see the error of one, as all that follow
    in the process see that of a device-side assert.
    """

    warning: type[Warning] = RankStateWarning
    baseline: ComputeState

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator()
        self._accelerator = None if found is None else Device(found.type)
        self._is_lost = False

    @property
    def _used(self) -> Device | None:
        """The accelerator, once this process uses it: questions would begin that."""
        return self._accelerator if self._accelerator and self._accelerator.is_used() else None

    def pytest_ranks_guard(self) -> AcceleratorGuard:
        return self

    def capture(self) -> ComputeState:
        return ComputeState.capture(self._used)

    def before(self) -> None:
        self.baseline = self.capture()
        if (device := self._used) is not None:
            device.forget_peak()

    def pytest_ranks_called(self) -> None:
        """Fail the test whose work on the accelerator fails behind it."""
        if (device := self._used) is not None and (error := _error_of(device)):
            pytest.fail(
                f"what the test has queued on the {device.unit} failed: {error}\n"
                "to see the line that queued it, run with CUDA_LAUNCH_BLOCKING=1",
                pytrace=False,
            )

    def after(self, raised: bool) -> Sequence[str]:
        if (device := self._used) is not None and (error := _error_of(device)):
            self._is_lost = True  # with all memory that this process has there
            return (
                [] if raised else [f"an error of its {device.unit}: {error} (the next test gets a new world)"]
            )
        now, baseline = self.capture(), self.baseline
        if now == baseline:
            return ()
        baseline.restore(device)
        return baseline.changes(now)

    def pytest_ranks_finished(self, ending: Ending) -> None:
        ending.usable = ending.usable and not self._is_lost


def _error_of(device: Device) -> str:
    """Wait until a device has nothing left to do; return the first line of its error."""
    try:
        device.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@dataclass(frozen=True, slots=True)
class ComputeState(Snapshot):
    """The settings by which torch computes in this process, and the current stream."""

    float32_precision: dict[str, Any]
    attention_backends: dict[str, bool]
    autocast: dict[str, tuple[bool, torch.dtype]]
    stream: Any
    """The current one, which names its device; None while this process uses none."""

    @classmethod
    def capture(cls, accelerator: Device | None) -> Self:
        """Return the state of now.

        Args:
            accelerator: that which this process uses.
        """
        return cls(
            float32_precision=float32_precision(),
            attention_backends={name: is_enabled() for name, (is_enabled, _) in _ATTENTION.items()},
            autocast={
                type: (torch.is_autocast_enabled(type), torch.get_autocast_dtype(type)) for type in AUTOCAST
            },
            stream=None if accelerator is None else accelerator.stream(),
        )

    def changes(self, now: Self) -> list[str]:
        """Return a line for each field in which `now` computes otherwise.

        "ieee" is the default where nothing is set: a test that cleans up sets it in the place of nothing.
        """
        return Snapshot.changes(self._effective(), now._effective())

    def _effective(self) -> Self:
        precision = {
            name: "ieee" if value == "none" else value for name, value in self.float32_precision.items()
        }
        return replace(self, float32_precision=precision)

    def restore(self, accelerator: Device | None) -> None:
        """Compute like this again."""
        set_float32_precision(self.float32_precision)
        for name, (_, enable) in _ATTENTION.items():
            enable(self.attention_backends[name])
        for type, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(type, enabled)
            torch.set_autocast_dtype(type, dtype)
        if accelerator is not None and self.stream is not None:
            accelerator.use_stream(self.stream)
