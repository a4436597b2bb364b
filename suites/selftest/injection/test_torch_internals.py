"""The private names of torch that disturbances use: operators of collectives, callbacks of a backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Variable

from lockstep.features.injection import torch_internals
from lockstep.features.injection.torch_internals import (
    _run,
    delayed_callbacks,
    is_coalescing,
    replaced_kernels,
    without_modes,
)
from lockstep.recorders.torch_internals import TorchDispatchMode


class Library:
    """A stand-in for what replaces kernels of operators."""

    def __init__(self, name: str, kind: str) -> None:
        self.made = name, kind
        self.kernels: dict[str, Any] = {}
        self.is_there = True

    def impl(self, name: str, kernel: Any, key: str, with_keyset: bool) -> None:
        assert (key, with_keyset) == ("BackendSelect", True)
        self.kernels[name] = kernel

    def _destroy(self) -> None:
        self.is_there = False


def test_all_operators_of_collectives_are_replaced_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Library] = []
    monkeypatch.setattr(torch.library, "Library", lambda *given: made.append(Library(*given)) or made[-1])

    def replacement(*_: object) -> Any: ...

    with replaced_kernels(replacement):
        (library,) = made
        assert library.is_there
    assert not library.is_there
    with pytest.raises(KeyError), replaced_kernels(replacement):
        raise KeyError
    assert not made[1].is_there
    assert library.made == ("c10d", "IMPL")
    assert len(library.kernels) == 20
    kernel = library.kernels["allreduce_"]
    assert kernel.func is torch_internals._run
    assert kernel.args == (torch.ops.c10d.allreduce_.default, "allreduce_", replacement)


class Operator:
    """An operator of the dispatcher with two arguments, of which the second has a default."""

    def __init__(self, returns: int, returned: object) -> None:
        arguments = [
            SimpleNamespace(name="tensors", has_default_value=lambda: False),
            SimpleNamespace(name="async_op", has_default_value=lambda: True, default_value=True),
        ]
        self._schema = SimpleNamespace(arguments=arguments, returns=[None] * returns)
        self.returned = returned
        self.ran: list[tuple[object, ...]] = []

    def redispatch(self, *given: object) -> object:
        self.ran.append(given)
        return self.returned


class Keys:
    def remove(self, key: object) -> object:
        assert key is torch._C.DispatchKey.BackendSelect
        return "other keys"


def test_a_replaced_operator_starts_with_changed_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Work, "unbox", lambda handle: f"work of {handle}")
    seen: list[object] = []

    def replacement(name: str, given: Any, start: Any) -> Any:
        seen.append((name, dict(given)))
        seen.append(start())
        seen.append(start(tensors="changed"))
        return SimpleNamespace(boxed=lambda: "boxed")

    two = Operator(2, ("tensors", "handle"))
    assert _run(two, "allreduce_", replacement, Keys(), "given") == ("given", "boxed")
    assert seen == [
        ("allreduce_", {"tensors": "given", "async_op": True}),
        *("work of handle", "work of handle"),
    ]
    assert two.ran == [("other keys", "given", True), ("other keys", "changed", True)]
    one = Operator(1, "handle")
    assert _run(one, "barrier", replacement, Keys(), "given", async_op=False) == "boxed"
    assert one.ran[0] == ("other keys", "given", False)
    seen.clear()
    none = Operator(0, None)
    assert _run(none, "monitored_barrier_", replacement, Keys(), tensors="named") is None
    assert seen[1:] == [None, None]
    assert none.ran[0] == ("other keys", "named", True)


def test_callbacks_of_a_backward_come_late() -> None:
    before = Variable._execution_engine
    done: list[str] = []

    class Called(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            Variable._execution_engine.queue_callback(lambda: done.append("callback"))
            done.append("backward")
            return gradient

    def backward() -> None:
        Called.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]

    with delayed_callbacks(lambda: done.append("delay")):
        assert Variable._execution_engine.is_checkpoint_valid == before.is_checkpoint_valid
        backward()
        assert done == ["backward", "delay", "callback"]
    assert Variable._execution_engine is before
    with pytest.raises(KeyError), delayed_callbacks(lambda: None):
        raise KeyError
    assert Variable._execution_engine is before
    backward()
    assert done[3:] == ["backward", "callback"]


def test_no_mode_sees_what_is_computed_without_modes() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]
        with without_modes():
            torch.ones(1).neg()
        assert seen == []
        torch.ones(1)
    assert seen == ["ones"]


def test_a_group_that_batches_calls_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(pg_coalesce_state={"batches": []})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    assert is_coalescing("batches")  # type: ignore[arg-type]
    assert not is_coalescing("other")  # type: ignore[arg-type]
    del world.pg_coalesce_state
    assert not is_coalescing("batches")  # type: ignore[arg-type]
