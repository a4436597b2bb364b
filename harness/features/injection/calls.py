"""Every collective of a rank, passed through layers that may disturb it. Inside a rank.

Python callers, C++ callers (DDP's reducer) and functional collectives all reach one of two places: the
kernels of torch's operators `c10d::*`, or the methods of a group of shm.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.features.injection.torch_internals import Start, is_coalescing, replaced_kernels
from lockstep.features.injection.work import Watched
from lockstep.recorders.collectives import Collective, spelled
from lockstep.recorders.tensors import named_tensors, short
from lockstep.recorders.torch_internals import group_of, in_backward
from lockstep.tracebacks import is_installed

__tracebackhide__ = True  # under pytest a failure points to the call

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], "dist.Work | None"]
"""Start the collective with these tensors in the place of `Call.written` and `Call.read`."""


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Attributes:
        about: the collective as a log shows it; its index and its label are not known here.
        group: whose it is.
        written: the tensors that it fills.
        read: the tensors that it sends; none where it sends those that it fills.
        in_place: whether it sends what is in `written`.
        is_async: whether the caller gets a handle and goes on.
        result: the value of its handle.
        is_batched: whether its handle means nothing, as the group batches calls.
    """

    about: Collective
    group: dist.ProcessGroup
    written: list[Tensor]
    read: list[Tensor]
    in_place: bool
    is_async: bool
    result: list[Tensor]
    is_batched: bool

    def title(self, number: int) -> str:
        """Return what a report calls it: "all_reduce #3 (float32[8], 2 ranks)"."""
        about = self.about
        inputs = [f"{short(d)}{list(s)}" for d, s in zip(about.dtypes, about.shapes, strict=True)]
        ranks = f"{about.group_size} rank{'s' if about.group_size > 1 else ''}"
        return f"{about.op} #{number} ({', '.join([*inputs, ranks])})"

    def phase(self) -> str:
        """Return what calls it here: " in backward", " in forward of layer.2", or "" of neither."""
        if self.about.in_backward:
            return " in backward"
        module = _running_module()
        return f" in forward of {module}" if module else ""


Layer = Callable[[Call, Run], "dist.Work | None"]
"""A disturbance: it runs the collective, or not, and returns a handle."""


class Interception:
    """The layers of this process, the innermost first; nothing is replaced while there is none."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._stack = ExitStack()
        self._works: list[Watched] = []
        self._holding: list[Watched] = []
        self._local = threading.local()

    @contextmanager
    def layer(self, layer: Layer, is_innermost: bool = False) -> Iterator[None]:
        """Let `layer` run each collective, around the layers that there are or inside of them."""
        if not self._layers:
            self._install()
        self._layers.insert(0 if is_innermost else len(self._layers), layer)
        try:
            yield
        finally:
            self._layers.remove(layer)
            if not self._layers:
                self._stack.close()

    def forget(self) -> None:
        """Let go of all handles, unless there is a layer: C++ code waits for none of them any more."""
        if not self._layers:
            self._works.clear()
            self._holding.clear()

    def _install(self) -> None:
        self._stack.enter_context(replaced_kernels(self._run))
        if shm := sys.modules.get("lockstep.shm"):
            self._stack.callback(shm.intercept(self._run))

    def _run(self, name: str, given: Mapping[str, Any], start: Start) -> Any:
        if getattr(self._local, "is_inside", False):  # a backend calls a collective for another one
            return start()
        call, names = _read_call(name, given)

        def run(written: Sequence[Tensor], read: Sequence[Tensor]) -> dist.Work | None:
            changed: dict[str, Any] = {}
            for key, tensors in zip(names, (written, read), strict=True):
                if key:
                    changed[key] = _rebuilt(given[key], iter(tensors))
            self._local.is_inside = True
            try:
                work: dist.Work | None = start(**changed)
            finally:
                self._local.is_inside = False
            return work

        outermost: Run = run
        for layer in list(self._layers):  # another thread may remove one
            outermost = _applied(layer, call, outermost)
        work = outermost(call.written, call.read)
        if isinstance(work, Watched):
            # C++ code holds the C++ half of a handle alone, and may wait for it after the layers have gone.
            self._works.append(work)
            self._holding = [each for each in (*self._holding, work) if not each.release()]
        return work


INTERCEPTION = Interception()
"""The interception of this process, whose operators are its own."""


def _applied(layer: Layer, call: Call, run: Run) -> Run:
    def applied(written: Sequence[Tensor], read: Sequence[Tensor]) -> dist.Work | None:
        # What an outer layer has put in the place of tensors is what this one disturbs.
        return layer(replace(call, written=list(written), read=list(read)), run)

    return applied


_IN_PLACE = ("all_reduce", "all_reduce_coalesced")


def _read_call(name: str, given: Mapping[str, Any]) -> tuple[Call, tuple[str, str]]:
    """Return the call, and the names of the arguments that have what it writes and reads."""
    op = spelled(name)
    group = given.get("self") or group_of(given["process_group"])
    opts = given.get("opts")
    root = given.get("root_rank", getattr(opts, "rootRank", 0))
    outputs = next((key for key in given if key.startswith("output") and "split" not in key), "")
    inputs = next((key for key in given if key.startswith("input") and "split" not in key), "")
    if not outputs and not inputs and "tensors" in given:
        is_root = root == group.rank()
        writes = op in _IN_PLACE or op == "recv" or op == ("reduce" if is_root else "broadcast")
        reads = op == "send" or (op == "broadcast" and is_root)
        outputs, inputs = "tensors" if writes else "", "tensors" if reads else ""
    written, read = (list(named_tensors(given[key]).values()) if key else [] for key in (outputs, inputs))
    in_place = bool(written) and not inputs and op != "recv" and op != "broadcast"
    sent = written if in_place else read
    about = Collective(
        op=op,
        dtypes=tuple(each.dtype for each in sent),
        shapes=tuple(tuple(each.shape) for each in sent),
        nbytes=sum(each.numel() * each.itemsize for each in sent),
        group_size=group.size(),
        index=0,
        in_backward=in_backward(),
        group=group.group_name,
    )
    is_async = bool(given.get("async_op", getattr(opts, "asyncOp", op != "monitored_barrier")))
    result = written or list(named_tensors(given.get("tensors")).values())
    call = Call(about, group, written, read, in_place, is_async, result, is_coalescing(group))
    return call, (outputs, inputs)


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested lists like `value`, of other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    return [_rebuilt(each, tensors) for each in value]


def _running_module() -> str:
    """Return the name of the innermost module that is called on this thread, in the outermost one."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code  # an engine may gather in a `__call__` of its own
        if code is torch.nn.Module.__call__.__code__ or code.co_name == "__call__":
            called = frame.f_locals.get("self")
            modules += [called] if isinstance(called, torch.nn.Module) else []
        frame = frame.f_back
    if not modules:
        return ""
    names = (name for name, module in modules[-1].named_modules() if module is modules[0])
    return next(names, "") or type(modules[0]).__name__


_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_HARNESS = str(Path(__file__).parents[2])
_ENGINE = f"{_HARNESS}/engine/"


NO_CODE = "a place without Python code"
"""Answer of `caller` where C++ code runs alone on a thread."""


def caller() -> str:
    """Return `file:line` of the user's code that runs here, and of an engine's that it has called."""
    frame: FrameType | None = sys._getframe(1)
    engine = ""
    while frame is not None:
        match _owner(frame.f_code.co_filename):
            case "user":
                return f"{_place(frame)} ({engine})" if engine else _place(frame)
            case "engine" if not engine:
                engine = "/".join(_place(frame).split("/")[-2:])
        frame = frame.f_back
    return engine or NO_CODE


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.removeprefix(f'{os.getcwd()}/')}:{frame.f_lineno}"


@functools.cache  # there are fifty frames below a collective in a backward
def _owner(file: str) -> str:
    """Return "user", "engine", or "" of what neither has written."""
    if not is_installed(file):
        return "user"
    if file.startswith(_HARNESS):
        return "engine" if file.startswith(_ENGINE) else ""
    is_other = not file.startswith(("<", _TORCH)) and not file.endswith("typing_extensions.py")
    return "engine" if is_other and (not file.startswith(_STDLIB) or "-packages" in file) else ""
