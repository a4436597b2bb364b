"""The log of all that a rank computes: its events, their names, lines and values, in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.recorders import execution
from lockstep.recorders.execution import Event, ExecutionLog, _joined, active_log, fingerprint

HERE = Path(__file__).name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1, bias=False)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.scale: Tensor
        nn.init.constant_(self.inner.weight, 3.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"sum": self.inner(x), "scaled": x * self.scale}


def train(log: ExecutionLog, model: nn.Module) -> int:
    """Train for one step of SGD; return the line of the forward."""
    line = sys._getframe().f_lineno + 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    output = model(torch.ones(1, 2))
    output["sum"].sum().backward()
    optimizer.step()
    return line


def listed(log: ExecutionLog, *kinds: str) -> list[tuple[str, str, object]]:
    """Return the kind, the name and the value of events."""
    events = [each for each in log.events if not kinds or each.kind in kinds]
    return [(each.kind, each.name, None if each.value is None else each.value.tolist()) for each in events]


def test_a_training_step_is_recorded_in_the_order_of_its_execution() -> None:
    model, log = Model(), ExecutionLog(str(Path(__file__).parent))
    with log:
        assert active_log() is log
        line = train(log, model)
    assert listed(log) == [
        ("parameter", "inner.weight", [[3.0, 3.0]]),
        ("output", "inner", [[6.0]]),
        ("buffer", "scale", [2.0]),
        ("output", "[sum]", [[6.0]]),
        ("output", "[scaled]", [[2.0, 2.0]]),
        ("gradient of output", "inner", [[1.0]]),
        ("gradient of output", "[sum]", [[1.0]]),
        ("local gradient", "inner.weight", [[1.0, 1.0]]),
        ("gradient", "inner.weight", [[1.0, 1.0]]),
        ("updated parameter", "inner.weight", [[2.0, 2.0]]),
    ]
    assert [each.step for each in log.events] == [0] * 10
    assert log.step == 1
    assert [each.in_backward for each in log.events] == [False] * 5 + [True] * 3 + [False] * 2
    lines = [each.line for each in log.events]
    assert lines[1] == f"{HERE}:{Model.forward.__code__.co_firstlineno + 1}"
    assert lines[3] == lines[6] == f"{HERE}:{line}"
    assert lines[8] == lines[9] == f"{HERE}:{line + 2}"
    assert all(each.fingerprint == fingerprint(each.value) for each in log.events if each.value is not None)


def test_events_are_counted_in_each_step_and_run() -> None:
    model, log = Model(), ExecutionLog()
    with log:
        train(log, model)
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        first = [each.key for each in log.events if each.name == "inner" and each.kind == "output"]
        place = log.begin_run({model: "model", model.inner: "own"})
        assert place == len(log.events)
        train(log, model)
    assert first == [("output", "inner", 0, 0), ("output", "inner", 1, 0), ("output", "inner", 1, 1)]
    keys = [each.key for each in log.events[place:]]
    assert ("output", "own", 0, 0) in keys
    assert ("output", "model[sum]", 0, 0) in keys
    assert ("parameter", "own.weight", 0, 0) in keys
    assert ("gradient", "own.weight", 0, 0) in keys
    assert log.step == 1


def test_parameters_of_an_optimizer_without_a_module_are_numbered() -> None:
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    second.grad = torch.full((1,), 2.0)
    with ExecutionLog() as log:
        torch.optim.SGD([first, second], lr=1.0).step()
    assert listed(log) == [
        ("gradient", "parameter 1 of the optimizer", [2.0]),
        ("updated parameter", "parameter 0 of the optimizer", [1.0]),
        ("updated parameter", "parameter 1 of the optimizer", [-1.0]),
    ]


def test_a_compiled_module_has_the_names_of_its_model() -> None:
    outer = nn.Module()
    outer._orig_mod = nn.Sequential(nn.Identity())
    log = ExecutionLog()
    log._before_module(outer, ())
    assert [*log._names.values()] == ["", "", "0"]
    log._before_module(outer._orig_mod, ())
    assert log._names[outer._orig_mod] == ""


def test_nothing_is_recorded_while_it_is_paused_or_over() -> None:
    model, log = Model(), ExecutionLog()
    with log:
        with log.paused():
            with log.paused():
                model(torch.ones(1, 2))
            log.record("loss", {"x": torch.ones(1)})
            torch.ones(1).to(torch.float16)
        assert log.events == []
        output = model(torch.ones(1, 2))["sum"]
        before = len(log.events)
    output.sum().backward()
    model(torch.ones(1, 2))
    assert len(log.events) == before
    assert (log._names, log._leaves) == ({}, {})


def test_a_parameter_is_watched_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    with ExecutionLog() as log:
        (model(torch.ones(1, 1)) + model(torch.ones(1, 1))).sum().backward()
        frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
        frozen(torch.ones(1, 1, requires_grad=True)).sum().backward()
    kinds = [each.kind for each in log.events]
    assert kinds.count("local gradient") == 1
    assert kinds.count("gradient of output") == 3


def test_what_the_user_records_has_its_line() -> None:
    with ExecutionLog(os.path.dirname(__file__)) as log:
        log.record("loss", {"a": torch.ones(1), "none": None, "b": torch.zeros(1)})
        log.record("loss", {"c": torch.ones(1)}, "x.py:3")
    assert listed(log) == [("loss", "a", [1.0]), ("loss", "b", [0.0]), ("loss", "c", [1.0])]
    line = test_what_the_user_records_has_its_line.__code__.co_firstlineno + 2
    assert [each.line for each in log.events] == [f"{HERE}:{line}"] * 2 + ["x.py:3"]


def test_a_value_is_a_copy_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MAX_BYTES", 12)
    value = torch.ones(2)
    log = ExecutionLog()
    log.record("loss", {"a": value, "b": value[:1], "c": value[:1]})
    value.fill_(5.0)
    first, second, third = log.events
    assert first.value is not None
    assert first.value.tolist() == [1.0, 1.0]
    assert second.value is not None
    assert third.value is None
    assert third.fingerprint == second.fingerprint == fingerprint(torch.ones(1))


def test_values_of_a_dtype_with_fewer_bits_are_casts() -> None:
    double, out = torch.ones(2, dtype=torch.float64), [torch.zeros(2, dtype=torch.float16)]
    with ExecutionLog() as log:
        double.to(torch.float32)
        double.to(torch.float32).to(torch.float64)
        double.to(torch.int32)
        torch.ones(2, dtype=torch.int64).to(torch.float32)
        double.clone(memory_format=torch.contiguous_format)
        double.to(torch.float64, copy=True)
        out[0].copy_(double)
        torch._foreach_copy_(out, [torch.ones(2)])
    names = [each.name for each in log.events]
    assert names == ["float64 -> float32"] * 2 + ["float64 -> float16", "float32 -> float16"]
    assert {(each.kind, each.value, each.fingerprint) for each in log.events} == {("cast", None, "")}


def test_an_output_in_backward_is_a_recomputed_one() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
    with ExecutionLog() as log:
        checkpoint(model, torch.ones(1, 1), use_reentrant=False).sum().backward()
    found = [(each.kind, each.number) for each in log.events if each.name == "0"]
    assert found == [("output", 0), ("recomputed output", 0), ("gradient of output", 0)]


# Collectives


class Operator:
    """An operator of the dispatcher that starts a collective."""

    namespace = "c10d"

    def __init__(self, name: str, *arguments: str) -> None:
        self.overloadpacket = type("Packet", (), {"__name__": name})()
        self.overloadpacket.__name__ = name
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=each) for each in arguments])
        self.called: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.called.append((args, kwargs))
        return "handle"


class Flight:
    """A stand-in for the record of collectives in flight."""

    def __init__(self) -> None:
        self.added: list[tuple[object, ...]] = []
        self.checked: list[object] = []

    def add(self, out: object, reads: list[Tensor], writes: list[Tensor], *more: object) -> None:
        self.added.append((out, [each.tolist() for each in reads], [each.tolist() for each in writes], *more))

    def is_any(self) -> bool:
        return bool(self.added)

    def check(self, func: object, *more: object) -> None:
        self.checked.append((func, *more))


@pytest.fixture
def flight(monkeypatch: pytest.MonkeyPatch) -> Flight:
    monkeypatch.setattr(execution, "caller_of_operator", lambda: "user")
    return Flight()


def log_with(flight: Flight) -> ExecutionLog:
    log = ExecutionLog(os.path.dirname(__file__))
    log._in_flight = flight  # type: ignore[assignment]
    return log


def test_a_collective_is_recorded_with_its_inputs(flight: Flight) -> None:
    log, a, b = log_with(flight), torch.ones(2), torch.full((1, 1), 2.0)
    gather = Operator("allgather_", "output_tensors", "input_tensors", "process_group")
    line = sys._getframe().f_lineno + 1
    assert log.__torch_dispatch__(gather, (), ([[a, b]], [b]), {"timeout": -1}) == "handle"
    reduce = Operator("allreduce_", "tensors")
    log.__torch_dispatch__(reduce, (), ([a, b],), {})
    log.__torch_dispatch__(Operator("barrier", "tensor"), (), (3,))
    one, two = "all_gather #1 float32[1, 1]", "all_reduce #2 float32[2], float32[1, 1]"
    assert listed(log) == [
        ("input of collective", one, [[2.0]]),
        ("input of collective", two, [1.0, 1.0, 2.0]),
        ("input of collective", "barrier #3", None),
    ]
    assert flight.added == [
        ("handle", [[[2.0]]], [[1.0, 1.0], [[2.0]]], one, f"{HERE}:{line}"),
        ("handle", [[1.0, 1.0], [[2.0]]], [[1.0, 1.0], [[2.0]]], two, f"{HERE}:{line + 2}"),
        ("handle", [], [], "barrier #3", f"{HERE}:{line + 3}"),
    ]
    assert gather.called == [(([[a, b]], [b]), {"timeout": -1})]
    log.begin_run({})
    log.__torch_dispatch__(reduce, (), ([a],), {})
    assert log.events[-1].name == "all_reduce #1 float32[2]"


def test_a_collective_of_torch_itself_is_not_watched(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_with(flight)
    monkeypatch.setattr(execution, "caller_of_operator", lambda: "torch")
    log.__torch_dispatch__(Operator("allreduce_", "tensors"), (), ([torch.ones(1)],))
    assert (len(log.events), flight.added) == (1, [])


def test_other_operations_are_checked_while_one_is_in_flight(flight: Flight) -> None:
    log, add = log_with(flight), Operator("add")
    add.namespace = "aten"
    assert log.__torch_dispatch__(add, (), (1,), {"x": 2}) == "handle"
    assert flight.checked == []
    waits = Operator("wait_tensor")
    flight.added.append(())
    log.__torch_dispatch__(add, (), (1,))
    log.__torch_dispatch__(waits, (), (3,))
    assert flight.checked == [(add, (1,), {}), (waits, (3,), {})]
    assert add.called == [((1,), {"x": 2}), ((1,), {})]
    with log.paused():
        assert log.__torch_dispatch__(add, (), (1,), {"x": 2}) == "handle"
    assert len(flight.checked) == 2
    assert log.events == []
    flat = SimpleNamespace(__tensor_flatten__=None)
    assert log.__torch_dispatch__(add, (int, flat), ()) is NotImplemented
    assert log.__torch_dispatch__(add, (int,), ()) == "handle"


def test_what_a_collective_has_written_and_a_race_are_events(flight: Flight) -> None:
    log = log_with(flight)
    log._waited("all_reduce #1", [torch.ones(1), torch.zeros(1)], "x.py:1")
    line = sys._getframe().f_lineno + 1
    log._raced("all_reduce #1", "x.py:1", "read its output", Operator("mm"))
    assert listed(log)[0] == ("output of collective", "all_reduce #1", [1.0, 0.0])
    assert log.events[0].line == "x.py:1"
    race = log.events[1]
    assert (race.kind, race.line, race.value) == ("race", f"{HERE}:{line}", None)
    assert race.name.startswith("all_reduce #1, begun at x.py:1, was not waited for before `")
    assert race.name.endswith(f"` read its output at {HERE}:{line}")


def test_tensors_of_one_dtype_are_joined() -> None:
    a, b = torch.ones(1, 1, requires_grad=True), torch.zeros(2)
    assert _joined([]) is None
    assert _joined([a]) is a
    joined = _joined([a, b])
    assert joined is not None
    assert joined.tolist() == [1.0, 0.0, 0.0]
    assert not joined.requires_grad
    assert _joined([a, torch.ones(1, dtype=torch.int8)]) is None


def test_a_fingerprint_is_of_the_dtype_the_shape_and_all_bits() -> None:
    zero = torch.zeros(2)
    assert fingerprint(zero).startswith("float32[2] ")
    assert len(fingerprint(zero).split()[1]) == 16
    others = (-zero, zero[:1], zero.view(2, 1), zero.view(torch.int32))
    assert len({fingerprint(zero), *map(fingerprint, others)}) == 5
    assert fingerprint(zero.clone()) == fingerprint(zero)


def test_an_event_is_named_by_all_but_its_value() -> None:
    event = Event("output", "a", 2, 3, "x.py:1", torch.ones(1), "print", True)
    assert event.key == ("output", "a", 2, 3)
