"""A log of all that a rank computes, with values: for finding the place where two runs part.

Inside a rank; imports torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.recorders.collectives import NOT_COLLECTIVES, spelled
from lockstep.recorders.in_flight import InFlight
from lockstep.recorders.tensors import flat_bytes, local_part, named_tensors, short
from lockstep.recorders.torch_internals import (
    COMPILED,
    TorchDispatchMode,
    caller_of_operator,
    in_backward,
    untraced,
)
from lockstep.tracebacks import is_installed

__all__ = ["Event", "ExecutionLog", "active_log"]

MAX_BYTES = 2**30
"""Bytes of values that a log keeps. What comes later is known by its fingerprint only."""

_COPIES = frozenset({"_to_copy", "copy_", "_foreach_copy_"})

_active: ContextVar[ExecutionLog | None] = ContextVar("harness_execution_log", default=None)


def active_log() -> ExecutionLog | None:
    """Return the log that this rank records into; None in all runs but the second one of a failed test."""
    return _active.get()


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: a value was computed, a collective or a cast ran.

    Attributes:
        kind: "parameter", "buffer", "output", "gradient of output", "local gradient", "gradient",
            "updated parameter", "loss", "input of collective", "output of collective", "cast", "race".
        name: the module, the parameter, the operation; of a cast its dtypes.
        step: optimizer steps before it.
        number: which event of that kind and name it is in its step, from 0.
        value: a copy on the CPU; None where there is none, or no more room for it.
        fingerprint: fingerprint of its dtype, shape and bits; empty without a value.
        line: `file:line` of the user's code; of a gradient, the line of the forward that it belongs to.
        in_backward: whether autograd was running.
    """

    kind: str
    name: str
    step: int
    number: int
    line: str
    value: torch.Tensor | None = None
    fingerprint: str = ""
    in_backward: bool = False

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Return what names the same event of another run or rank."""
        return self.kind, self.name, self.step, self.number


class ExecutionLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Record outputs of modules, gradients, collectives and casts, with their values, while it is entered.

    It also watches what collectives have in flight: an operation that reads their output, or writes their
    input, before the test has waited for them is a race, whether it goes wrong this time or not.

    Attributes:
        events: in order of execution.
        step: which optimizer step it is in, from 0.

    Args:
        base: directory that the user's files are named from.
    """

    def __init__(self, base: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.step = 0
        self._base = f"{base or os.getcwd()}/"
        self._names: dict[nn.Module, str] = {}
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._collectives = 0
        self._room = MAX_BYTES
        self._leaves: dict[int, torch.Tensor] = {}
        self._is_quiet = False
        self._is_on = False
        self._in_flight = InFlight(self._waited, self._raced)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for handle in (
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(self._in_flight)
        token = _active.set(self)
        self._stack.callback(_active.reset, token)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_on = False
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._stack.close()
        self._leaves.clear()
        self._names.clear()

    def begin_run(self, names: Mapping[nn.Module, str]) -> int:
        """Count steps and collectives from 0 again, and call these modules by these names.

        Returns:
            The place in `events` where the run begins.
        """
        self.step = self._collectives = 0
        # Of hooks on all modules, as those of this log; torch runs nothing compiled under it.
        of_hooks = "Using `torch.compile.module.` when there are global hooks"
        warnings.filterwarnings("ignore", of_hooks, UserWarning)
        self._counts.clear()
        self._names.update(names)
        return len(self.events)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of what the test's own checks compute."""
        was_quiet, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = was_quiet

    def record(self, kind: str, values: Mapping[str, torch.Tensor | None], line: str = "") -> None:
        """Record values of the user's, by name; what computes them is not recorded."""
        line = line or self.user_line()
        for name, value in values.items():
            if value is not None:
                self._add(kind, name, value, line)

    # Modules

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:  # the outermost one of its model
            for name, each in module.named_modules():
                self._names.setdefault(each, f"{name}.".replace(COMPILED, "")[:-1])

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record what the module computed, and its parameters: here an engine has not resharded it yet."""
        if self._is_quiet:
            return
        name, line = self._names.get(module, type(module).__name__), self.user_line()
        own: dict[str, Any] = {**vars(module), **module._parameters}  # engines put tensors in their place
        for kind, tensors in (("parameter", own), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    full = f"{name}.{key}" if name else key
                    self._add(kind, full, tensor, line)
                    self._watch_leaf(full, tensor, line)
        for path, tensor in named_tensors(output).items():
            place = f"{name}[{path}]" if path else name
            self._add("output", place, tensor, line)
            if tensor.requires_grad:
                tensor.register_hook(self._hook("gradient of output", place, line))  # type: ignore[no-untyped-call]

    def _watch_leaf(self, name: str, tensor: torch.Tensor, line: str) -> None:
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._leaves:
            self._leaves[id(tensor)] = tensor  # so that no other one gets its id
            handle = tensor.register_hook(self._hook("local gradient", name, line))  # type: ignore[no-untyped-call]
            self._stack.callback(handle.remove)

    def _hook(self, kind: str, name: str, line: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            if self._is_on:
                self._add(kind, name, gradient, line)

        return record

    # Optimizers

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._record_parameters("gradient", optimizer, lambda parameter: parameter.grad)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._record_parameters("updated parameter", optimizer, lambda parameter: parameter)
        self.step += 1

    def _record_parameters(
        self,
        kind: str,
        optimizer: torch.optim.Optimizer,
        read: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = {
            id(each): f"{name}.{key}" if name else key
            for module, name in self._names.items()
            for key, each in module._parameters.items()
        }
        line = self.user_line()
        for place, parameter in enumerate(parameters):
            value = read(parameter)
            if value is not None:
                self._add(kind, names.get(id(parameter), f"parameter {place} of the optimizer"), value, line)

    # Operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method by `torch.compiler.disable`, see `untraced`

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A wrapper subclass (DTensor) goes first, and comes back here with plain tensors.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_quiet:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name not in NOT_COLLECTIVES:
            return self._run_collective(func, spelled(name), args, kwargs)
        if name in _COPIES:
            self._record_casts(name, args, kwargs)
        if self._in_flight.is_any():
            self._in_flight.check(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_collective(self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._collectives += 1
        names = (argument.name for argument in func._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        reads, writes = [], []
        for key, value in given.items():
            tensors = [local_part(each) for each in named_tensors(value).values()]
            reads += tensors if key.startswith(("input", "tensor")) else []
            writes += tensors if key.startswith(("output", "tensor")) else []
        title, line = f"{op} #{self._collectives}", self.user_line()
        about = ", ".join(f"{short(each.dtype)}{list(each.shape)}" for each in reads)
        title = f"{title} {about}".rstrip()
        with self.paused():
            handed_in = _joined(reads)
        self._add("input of collective", title, handed_in, line)
        out = func(*args, **kwargs)
        if caller_of_operator() != "torch":  # who starts it in C++, as DDP, waits for it there too
            self._in_flight.add(out, reads, writes, title, line)
        return out

    def _waited(self, title: str, written: list[torch.Tensor], line: str) -> None:
        with self.paused():
            received = _joined(written)
        self._add("output of collective", title, received, line)

    def _raced(self, title: str, begun: str, verb: str, func: Any) -> None:
        here = self.user_line()
        early = f"was not waited for before `{func.overloadpacket}` {verb} at {here}"
        self._add("race", f"{title}, begun at {begun}, {early}", None, here)

    def _record_casts(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "_to_copy":
            pairs = [(args[0].dtype, kwargs.get("dtype") or args[0].dtype)]
        elif name == "copy_":
            pairs = [(args[1].dtype, args[0].dtype)]
        else:
            pairs = [(source.dtype, to.dtype) for to, source in zip(args[0], args[1], strict=False)]
        for source, to in pairs:
            if source.is_floating_point and to.is_floating_point and to.itemsize < source.itemsize:
                self._add("cast", f"{short(source)} -> {short(to)}", None, self.user_line())

    def _add(self, kind: str, name: str, value: torch.Tensor | None, line: str) -> None:
        if self._is_quiet:
            return
        with self.paused():
            kept = None if value is None else local_part(value).detach().cpu().clone()
            print_of = "" if kept is None else fingerprint(kept)
        recomputed = kind == "output" and in_backward()
        kind = "recomputed output" if recomputed else kind
        number = self._counts[kind, name, self.step]
        self._counts[kind, name, self.step] += 1
        if kept is not None:
            self._room -= kept.numel() * kept.itemsize
            kept = kept if self._room >= 0 else None
        self.events.append(Event(kind, name, self.step, number, line, kept, print_of, in_backward()))

    def user_line(self) -> str:
        """Return `file:line` of the innermost frame that is the user's, "" if there is none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_installed(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename.removeprefix(self._base)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a text that two tensors share only if their dtypes, shapes and all bits are the same."""
    bits = hashlib.sha256(flat_bytes(tensor.cpu()).numpy().tobytes()).hexdigest()
    return f"{short(tensor.dtype)}{list(tensor.shape)} {bits[:16]}"


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor with the values of several; None if there is none to show."""
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    if len({each.dtype for each in tensors}) > 1:
        return None
    return torch.cat([each.detach().reshape(-1) for each in tensors])
