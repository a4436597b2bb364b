"""A log of the dtypes that modules receive in forward. Inside a rank; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lockstep.recorders.tensors import named_tensors, short
from lockstep.recorders.torch_internals import in_backward

__all__ = ["ForwardCall", "ForwardDtypes"]


@dataclass(frozen=True)
class ForwardCall:
    """The dtypes that one call of one module's `forward` worked with.

    Attributes:
        module: name of the module in the model that the log was made for; the model itself is "".
        inputs: dtype of every tensor argument, by its place: `0`, `mask`, `1.x` (see `named_tensors`).
        parameters: dtype of the module's own parameters, not those of its children, by name.
        buffers: dtype of each of its buffers, likewise.
        index: place in the log, from 0: the order in which the calls began.
        in_backward: whether autograd was running: recomputation under activation checkpointing.
    """

    module: str
    inputs: Mapping[str, torch.dtype]
    parameters: Mapping[str, torch.dtype]
    buffers: Mapping[str, torch.dtype]
    index: int
    in_backward: bool

    def __str__(self) -> str:
        parts = []
        for kind in ("inputs", "parameters", "buffers"):
            names = ", ".join(f"{name} {short(dtype)}" for name, dtype in getattr(self, kind).items())
            parts.append(f"{kind}: {names or 'none'}")
        return f"{self.index:>4}  {self.module or '(model)':<24} {'; '.join(parts)}"


class ForwardDtypes:
    """Record the dtypes of inputs, parameters and buffers at the moment each module's own `forward` begins.

    While the log is entered it wraps the `forward` of every module of `model`, inside of all hooks: it sees
    the casts of pre-forward hooks, whenever they were registered, and of wrapper modules. Names are those of
    `model.named_modules()` when the log is made: make it on the bare model, wrap the model for the engine,
    then enter, and every engine's log has the same names. Modules added later are not recorded. Entered
    again, a log continues.

        dtypes = ForwardDtypes(model)
        sharded = fully_shard(model, mp_policy=policy)
        with dtypes:
            sharded(x)
        assert dtypes.inputs("layers.0") == {torch.bfloat16}
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        # An engine may take parameters out of the module and put plain tensors in their place.
        self._parameters = {name: tuple(module._parameters) for name, module in self._modules.items()}
        self._calls: list[ForwardCall] = []
        self._wrappers: list[_RecordedForward] = []
        self._was_entered = False

    def __enter__(self) -> Self:
        if self._wrappers:
            raise RuntimeError("this log is entered already")
        self._was_entered = True
        self._wrappers = [_RecordedForward(self, name, module) for name, module in self._modules.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for recorded in self._wrappers:
            recorded.leave()
        self._wrappers = []

    def record(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record one call of the module `name`, about to run with these arguments."""
        module = self._modules[name]
        own = {p: getattr(module, p, None) for p in (*self._parameters[name], *module._parameters)}
        inputs = named_tensors({str(i): a for i, a in enumerate(args)} | dict(kwargs))
        self._calls.append(
            ForwardCall(
                module=name,
                inputs={path: tensor.dtype for path, tensor in inputs.items()},
                parameters={p: t.dtype for p, t in own.items() if isinstance(t, torch.Tensor)},
                buffers={b: t.dtype for b, t in module._buffers.items() if t is not None},
                index=len(self._calls),
                in_backward=in_backward(),
            )
        )

    @property
    def entries(self) -> tuple[ForwardCall, ...]:
        """Return all calls, in order; RuntimeError if the log was never entered."""
        if not self._was_entered:
            raise RuntimeError("this log was never entered: that it is empty proves nothing")
        return tuple(self._calls)

    def __iter__(self) -> Iterator[ForwardCall]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def calls(self, module: str | nn.Module) -> tuple[ForwardCall, ...]:
        """Return the calls of one module, in order.

        Args:
            module: name of the module, or the module itself.

        Raises:
            AssertionError: the module's forward was never called.
            ValueError: the model had no such module when the log was made.
        """
        names = {name for name, known in self._modules.items() if module == name or module is known}
        if not names:
            raise ValueError(f"the model has no module {module!r}; it has: {', '.join(self._modules)}")
        found = tuple(call for call in self.entries if call.module in names)
        if not found:
            called = ", ".join(dict.fromkeys(call.module or "(model)" for call in self)) or "no module at all"
            raise AssertionError(f"the forward of {module!r} was never called; called: {called}")
        return found

    def inputs(self, module: str | nn.Module) -> set[torch.dtype]:
        """Return the floating dtypes that the module's forward received, over all its calls.

        Errors as in `calls`, and AssertionError if it never received a floating tensor.
        """
        return self._floating(module, "inputs")

    def parameters(self, module: str | nn.Module) -> set[torch.dtype]:
        """Return the floating dtypes of its own parameters inside forward; errors as in `inputs`."""
        return self._floating(module, "parameters")

    def buffers(self, module: str | nn.Module) -> set[torch.dtype]:
        """Return the floating dtypes of its own buffers inside forward; errors as in `inputs`."""
        return self._floating(module, "buffers")

    def _floating(self, module: str | nn.Module, kind: str) -> set[torch.dtype]:
        calls = self.calls(module)
        found = {d for call in calls for d in getattr(call, kind).values() if d.is_floating_point}
        if not found:
            raise AssertionError(f"{module!r} had no floating-point {kind} in {len(calls)} calls")
        return found

    def __str__(self) -> str:
        return "\n".join(str(call) for call in self.entries) or "no forward was called"

    __repr__ = __str__


class _RecordedForward:
    """A wrapper of one module's `forward`, as an attribute of the instance.

    `Module.__call__` looks `forward` up last, after every pre-forward hook.
    """

    def __init__(self, log: ForwardDtypes, name: str, module: nn.Module) -> None:
        self.log, self.name, self.module = log, name, module
        self.was_on_instance = "forward" in vars(module)
        self.forward: Callable[..., Any] = module.forward
        self.is_on = True
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_on:
            self.log.record(self.name, args, kwargs)
        return self.forward(*args, **kwargs)

    def leave(self) -> None:
        self.is_on = False
        if vars(self.module).get("forward") is not self:
            return  # another wrapper was put over this one, and calls it
        if self.was_on_instance:
            self.module.forward = self.forward
        else:
            del self.module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied module must compute with its own parameters; this object would use the original's.
        return deepcopy(self.forward, memo)
