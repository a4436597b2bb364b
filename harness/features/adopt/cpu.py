"""`--ranks-adopt-cpu`: torch's own test classes for accelerators, on gloo and the CPU. Used on both sides.

torch's helpers for tests skip what wants more GPUs than there are, and its FSDP tests write `"cuda"` in many
places. With the option the machine looks, to the collection and the running of adopted tests and to nothing
else, as if it had `DEVICES` accelerators with tensors on the CPU. `PATCHES` is all that is replaced.
Imports torch, so it is imported only with the option.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lockstep.features.adopt.torch_internals import COMMON, parse_to

__tracebackhide__ = True

DEVICES = 4
"""Number of accelerators the machine seems to have: as many as torch's CI gives its distributed tests."""

_FSDP = "torch.testing._internal.common_fsdp"
_DTENSOR = "torch.testing._internal.distributed._tensor.common_dtensor"
_DEVICE_TYPE = "torch.testing._internal.common_device_type"
_ON_RANKS = ("MultiProcessTestCase", "MultiProcContinuousTest")
_ACCELERATOR_BACKENDS = ("nccl", "xccl", "hccl")


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is replaced, with what it becomes: a function of the original."""

    name: str
    """Module, a colon, attribute."""
    replace: Callable[[Any], Any]
    why: str

    def apply(self) -> contextlib.AbstractContextManager[Any]:
        """Replace it until the context ends; one that this version of torch lacks stays away."""
        module, _, path = self.name.partition(":")
        *owners, attribute = path.split(".")
        try:
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            original = getattr(owner, attribute)
        except (ImportError, AttributeError):
            return contextlib.nullcontext()
        return mock.patch.object(owner, attribute, self.replace(original))


class CudaIsCpu(TorchFunctionMode):
    """Takes `cuda` for `cpu`, and the number of a device too, wherever torch is given a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and args:
            return torch.device("cpu") if _is_accelerator(args[0]) else func(*args, **kwargs)
        if func in _TO_DEVICE:
            args = [*args]
            args[: _TO_DEVICE[func]] = [
                "cpu" if _is_accelerator(arg) else arg for arg in args[: _TO_DEVICE[func]]
            ]
        if _is_accelerator(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


_TO_DEVICE = {parse_to(): 1, torch.Tensor.to: 2}
"""Functions that take a device as a positional argument, with the number of arguments up to it."""


def _is_accelerator(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _number(_: object) -> Callable[[], int]:
    return lambda: DEVICES


def _nothing(_: object) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _skip_if_fewer(original: Any) -> Any:
    def skip_if_lt_x_gpu(x: int, **options: Any) -> Any:
        return lambda function: _unless_in_threads(function, original(x, **options)(function), x <= DEVICES)

    return skip_if_lt_x_gpu


def _skip_if_none(original: Any) -> Any:
    return lambda function: _unless_in_threads(function, original(function), True)


def _unless_in_threads(function: Any, skipping: Any, enough: bool) -> Any:
    """Return a method that runs if there are enough devices, but skips in the threads that torch starts."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        in_threads = isinstance(self, importlib.import_module(COMMON).MultiThreadedTestCase)
        return (function if enough and not in_threads else skipping)(self, *args, **kwargs)

    return method


def _with_cpu(original: Any) -> Any:
    def instantiate_device_type_tests(cls: type, scope: Any, *args: Any, **options: Any) -> Any:
        only: Any = options.get("only_for")
        common = importlib.import_module(COMMON)
        kinds = tuple(getattr(common, name) for name in _ON_RANKS if hasattr(common, name))
        if only is not None and issubclass(cls, kinds):
            options["only_for"] = (*([only] if isinstance(only, str) else only), "cpu")
        return original(cls, scope, *args, **options)

    return instantiate_device_type_tests


def _without_device_ids(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> Any:
        return original(self, module, None, None, *args, **kw)

    return __init__


def _on_gloo(backend: object) -> object:
    names = isinstance(backend, str) and any(name in backend for name in _ACCELERATOR_BACKENDS)
    return "gloo" if names else backend


def _group_on_gloo(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        return original(_on_gloo(backend), *args, **options)

    return init_process_group


def _pg_on_gloo(original: Any) -> Any:
    @functools.wraps(original)
    def init_pg(self: Any, eager_init: Any = False, backend: Any = None) -> Any:
        return original(self, False, _on_gloo(backend))

    return init_pg


def _sharded_on_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, device_id: Any = None, **options: Any) -> None:
        original(self, *args, device_id=torch.device("cpu"), **options)

    return __init__


def _mesh_on_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        original(self, "cpu" if _is_accelerator(device_type) else device_type, *args, **options)

    return __init__


PATCHES = (
    Patch(f"{COMMON}:skip_if_lt_x_gpu", _skip_if_fewer, "skips with more than 4 devices, and in threads"),
    Patch(
        f"{_DTENSOR}:skip_if_lt_x_gpu",
        _skip_if_fewer,
        "the same function, which `skip_unless_torch_gpu` calls",
    ),
    Patch(f"{COMMON}:skip_if_no_gpu", _skip_if_none, "skips in threads only"),
    Patch(f"{COMMON}:at_least_x_gpu", lambda _: lambda x: x <= DEVICES, "true up to 4"),
    Patch(f"{_FSDP}:DEVICE_COUNT", lambda _: DEVICES, "4: the world size of FSDPTest"),
    Patch(
        f"{_DEVICE_TYPE}:instantiate_device_type_tests", _with_cpu, "`only_for` accelerators means cpu too"
    ),
    Patch("torch:cuda.device_count", _number, "4, in skips and in world sizes"),
    Patch("torch:accelerator.device_count", _number, "4, in `FSDPTest._run` and in `init_pg`"),
    Patch("torch:cpu.device_count", _number, "4, where a test asks the module of its device"),
    Patch("torch:cuda.current_device", lambda _: lambda: 0, "0"),
    Patch("torch:cuda.set_device", _nothing, "does nothing"),
    Patch("torch:cuda.synchronize", _nothing, "does nothing"),
    Patch(
        "torch.distributed:init_process_group",
        _group_on_gloo,
        "on gloo, where nccl, xccl or hccl is asked for",
    ),
    Patch(f"{_DTENSOR}:DTensorTestBase.init_pg", _pg_on_gloo, "the same, for `with_comms(backend=...)`"),
    Patch("torch.distributed.device_mesh:DeviceMesh.__init__", _mesh_on_cpu, "a mesh of cuda is one of cpu"),
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
        _sharded_on_cpu,
        "`device_id` is cpu: without one it looks for an accelerator",
    ),
    Patch(
        "torch.nn.parallel:DistributedDataParallel.__init__",
        _without_device_ids,
        "`device_ids` and `output_device` are None",
    ),
)
"""Replacements, beside devices in calls of torch (`CudaIsCpu`)."""


@contextlib.contextmanager
def accelerators_on_cpu() -> Iterator[None]:
    """Apply the patches, in this thread the mode too, until the context ends."""
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch.apply())
        stack.enter_context(CudaIsCpu())
        yield


class CpuDevices:
    """The plugin that applies the patches while a file is imported, an item looked at, and an item run.

    Args:
        runs_here: whether an item is an adopted one that runs in this process.
    """

    def __init__(self, runs_here: Callable[[pytest.Item], bool]) -> None:
        self._runs_here = runs_here

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        with accelerators_on_cpu():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_itemcollected(self) -> Generator[None, Any, Any]:
        with accelerators_on_cpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if not self._runs_here(item):
            return (yield)
        with accelerators_on_cpu():
            return (yield)
