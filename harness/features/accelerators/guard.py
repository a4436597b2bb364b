"""The guard of a rank's accelerator: each test waits for its own work there, and answers for its errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import pytest
import torch
from torch.backends import cuda

from lockstep.backends.device import Device
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


@cache
def _autocast_types() -> tuple[str, ...]:
    """Return the types of device whose autocast is looked at."""
    found = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys(("cpu", "cuda", "xpu", *([found.type] if found else ()))))


class AcceleratorGuard:
    """Waits for what tests have queued, restores how torch computes, and gives up a rank with a lost device.

    Kernels run behind the test that queues them: a later test would see the error of one, as all that follow
    in the process see that of a device-side assert.

    Args:
        device: of the tensors of this rank.
    """

    warning: type[Warning] = RankStateWarning
    baseline: ComputeState

    def __init__(self, device: Device) -> None:
        self._device = None if device.is_cpu else device
        found = torch.accelerator.current_accelerator()
        other = None if found is None else Device(found.type)
        self._other = other if other and other.has_module else None
        self._is_lost = False

    @property
    def _used(self) -> Device | None:
        """The accelerator of the rank, or one that a test on CPU ranks has begun to use."""
        if self._device is None and self._other is not None and self._other.is_used():
            return self._other
        return self._device

    def pytest_ranks_guard(self) -> AcceleratorGuard:
        return self

    def capture(self) -> ComputeState:
        return ComputeState.capture(self._used)

    def before(self) -> None:
        self.baseline = self.capture()
        if (device := self._used) is not None:
            device.reset_peak_memory()

    def pytest_ranks_called(self) -> None:
        """Fail the test whose work on the accelerator fails behind it."""
        self._wait()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Fail for what tear-down has queued, and name the error of which a failure was a consequence."""
        result = yield
        self._wait()
        return result

    def pytest_ranks_failed(self, error: BaseException) -> None:
        """Do not fail again at tear-down for an error that the test has seen."""
        if (device := self._used) is not None and (lost := device.error()):
            self._is_lost = self._is_lost or lost in str(error)

    def _wait(self) -> None:
        if self._is_lost or (device := self._used) is None or not (error := device.error()):
            return
        self._is_lost = True  # with all memory that this process has there
        advice = "\nto see the line that queued it, run with CUDA_LAUNCH_BLOCKING=1"
        text = f"what the test has queued on the {device.unit} failed: {error}"
        pytest.fail(text + advice * (device.type == "cuda"), pytrace=False)

    def after(self, raised: bool) -> Sequence[str]:
        now, baseline = self.capture(), self.baseline
        if now == baseline or self._is_lost:
            return ()
        baseline.restore(self._used)
        return baseline.changes(now)

    def pytest_ranks_finished(self, ending: Ending) -> None:
        ending.usable = ending.usable and not self._is_lost


@dataclass(frozen=True, slots=True)
class ComputeState(Snapshot):
    """The settings by which torch computes in this process, and the current stream."""

    float32_precision: dict[str, Any]
    attention_backends: dict[str, bool]
    autocast: dict[str, Any]
    """The state of each type of device, the number of contexts, and whether they cache what they cast."""
    stream: Any
    """The current one, which names its device; None while this process uses no accelerator."""

    @classmethod
    def capture(cls, accelerator: Device | None) -> Self:
        """Return the state of now.

        Args:
            accelerator: that which this process uses.
        """
        autocast: dict[str, Any] = {
            type: (torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
            for type in _autocast_types()
        }
        autocast["contexts"] = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        autocast["cache"] = torch.is_autocast_cache_enabled()
        return cls(
            float32_precision=float32_precision(),
            attention_backends={name: is_enabled() for name, (is_enabled, _) in _ATTENTION.items()},
            autocast=autocast,
            stream=None if accelerator is None else accelerator.stream(),
        )

    def changes(self, now: Self) -> list[str]:
        """Return a line for each field in which `now` computes otherwise.

        "ieee" is the default where nothing is set: a test that cleans up sets it in the place of nothing. A
        test that begins to use the accelerator leaves no stream.
        """
        if self.stream is None:
            now = replace(now, stream=None)
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
        self._restore_autocast()
        if accelerator is not None and self.stream is not None:
            accelerator.use_stream(self.stream)

    def _restore_autocast(self) -> None:
        states = dict(self.autocast)
        contexts = states.pop("contexts")
        torch.set_autocast_cache_enabled(states.pop("cache"))
        for type, (enabled, dtype) in states.items():
            torch.set_autocast_enabled(type, enabled)
            torch.set_autocast_dtype(type, dtype)
        while (count := torch.autocast_decrement_nesting()) > contexts:
            pass
        while count < contexts:
            count = torch.autocast_increment_nesting()
        torch.clear_autocast_cache()  # of weights, by their identity: those of the test may change later
