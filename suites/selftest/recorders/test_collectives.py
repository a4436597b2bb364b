"""The log of collectives without a process group: what it reads of operators, and of shm."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.recorders import Collective, CollectivesLog, collectives
from lockstep.recorders.collectives import spelled


class Operator:
    """An operator of the dispatcher."""

    def __init__(self, name: str, *arguments: str, namespace: str = "_c10d_functional") -> None:
        self.namespace = namespace
        self.overloadpacket = SimpleNamespace(__name__=name)
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=each) for each in arguments])
        self.calls: list[tuple[object, ...]] = []
        self.runs: Any = lambda: None

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls.append((args, kwargs))
        self.runs()
        return "handle"


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Arguments that were given for a process group."""
    asked: list[object] = []

    def group_of(argument: object) -> Any:
        asked.append(argument)
        return SimpleNamespace(size=lambda: 4, group_name="7")

    monkeypatch.setattr(collectives, "group_of", group_of)
    return asked


def run(log: CollectivesLog, operator: Operator, *args: object, **kwargs: object) -> object:
    return log.__torch_dispatch__(operator, (), args, kwargs)


A, B = torch.ones(3), torch.ones(2, 2, dtype=torch.int8)


def test_an_operator_is_recorded_by_what_it_sends(groups: list[object]) -> None:
    log = CollectivesLog()
    log._was_entered = True
    gather = Operator("allgather_", "output_tensors", "input_tensors", "process_group")
    assert run(log, gather, [[B]], [A], timeout=-1, process_group="boxed") == "handle"
    assert gather.calls == [(([[B]], [A]), {"timeout": -1, "process_group": "boxed"})]
    split = Operator("all_to_all_single", "input_split_sizes", "input", "group_name")
    run(log, split, [B], A, "name")
    run(log, Operator("allreduce_coalesced_", "tensors"), [A, B])
    run(log, Operator("recv_", "tensors"), [A])
    run(log, Operator("barrier", "tensor"), A)
    f32, i8 = torch.float32, torch.int8
    assert log.entries == (
        Collective("all_gather", (f32,), ((3,),), 12, 4, 0, False),
        Collective("all_to_all_single", (f32,), ((3,),), 12, 4, 1, False),
        Collective("all_reduce_coalesced", (f32, i8), ((3,), (2, 2)), 16, 4, 2, False),
        Collective("recv", (), (), 0, 4, 3, False),
        Collective("barrier", (), (), 0, 4, 4, False),
    )
    assert groups == ["boxed", "name", None, None, None]
    assert {each.group for each in log} == {"7"}


def test_what_starts_no_collective_is_passed_on() -> None:
    log = CollectivesLog()
    log._was_entered = True
    waits, adds = Operator("wait_tensor", "tensor"), Operator("add", "tensors", namespace="aten")
    assert (run(log, waits, A), run(log, adds, A, alpha=2)) == ("handle", "handle")
    assert adds.calls == [((A,), {"alpha": 2})]
    flat = SimpleNamespace(__tensor_flatten__=None)
    assert log.__torch_dispatch__(Operator("barrier"), (int, flat)) is NotImplemented
    assert log.__torch_dispatch__(Operator("add", namespace="aten"), (int,)) == "handle"
    assert len(log) == 0


def test_a_collective_has_the_innermost_label() -> None:
    log = CollectivesLog()
    log._was_entered = True
    enter = Operator("_record_function_enter_new", namespace="profiler")
    leave = Operator("_record_function_exit", namespace="profiler")
    run(log, leave)
    for name in ("outer", "inner"):
        run(log, enter, name)
    run(log, Operator("barrier"))
    run(log, leave)
    run(log, Operator("other", namespace="profiler"))
    run(log, Operator("barrier"))
    run(log, leave)
    run(log, Operator("barrier"))
    assert [each.label for each in log] == ["inner", "outer", ""]


class Shm:
    """A stand-in for the backend of shared memory."""

    def __init__(self, *times: int) -> None:
        self.observers: list[Any] = []
        self.times = times

    def observe(self, observer: Any) -> Any:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def record(self) -> list[dict[str, int]]:
        return [{"time_created_ns": each} for each in self.times]


def entry(op: str = "all_gather_single") -> Any:
    return SimpleNamespace(op=op, inputs=[(torch.Size([2]), torch.float16)], group_size=3, group="g")


def test_calls_of_shm_are_recorded_on_the_thread_that_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Shm()
    monkeypatch.setitem(sys.modules, "lockstep.shm", shm)
    with CollectivesLog() as log:
        (observer,) = shm.observers
        observer(entry())
        observer(entry("broadcast"))
        thread = threading.Thread(target=observer, args=(entry(),), daemon=True)
        thread.start()
        thread.join(60)
        inside = Operator("barrier")
        inside.runs = lambda: observer(entry())
        run(log, inside)
        inside.runs = lambda: {}["missing"]
        with pytest.raises(KeyError):
            run(log, inside)
        observer(entry("isend"))
    assert shm.observers == []
    assert [each.op for each in log] == ["all_gather_into_tensor", "broadcast", "barrier", "barrier", "send"]
    first = next(iter(log))
    assert first == Collective("all_gather_into_tensor", (torch.float16,), ((2,),), 4, 3, 0, False)
    assert first.group == "g"


def test_a_log_that_has_missed_shm_refuses_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lockstep.shm", raising=False)
    log = CollectivesLog()
    with log:
        assert log.entries == ()
        since = log._blind_since
        assert since > 1e18  # nanoseconds since 1970
        monkeypatch.setitem(sys.modules, "lockstep.shm", Shm(since - 1))
        assert log.entries == ()
        monkeypatch.setitem(sys.modules, "lockstep.shm", Shm(since - 1, since))
        with pytest.raises(RuntimeError, match="this log has missed collectives of shm, which was imported"):
            len(log)
    with pytest.raises(RuntimeError, match="has missed"):
        str(log)
    with log, pytest.raises(RuntimeError, match="has missed"):
        log.counts()
    monkeypatch.delitem(sys.modules, "lockstep.shm")
    with CollectivesLog() as other:
        monkeypatch.setitem(sys.modules, "lockstep.shm", Shm(1))
    monkeypatch.setitem(sys.modules, "lockstep.shm", Shm(2**63))
    assert other.entries == ()


def test_an_entry_reads_as_a_line() -> None:
    f32 = torch.float32
    one = Collective("all_reduce", (f32, torch.int8), ((2, 3), ()), 25, 2, 7, True, "sync")
    assert str(one) == (
        "   7  all_reduce                               25 B    2 ranks  float32[2, 3], int8[]  backward sync"
    )
    other = Collective("barrier", (), (), 0, 2, 0, False)
    assert str(other) == "   0  barrier                                   0 B    2 ranks"
    log = CollectivesLog()
    log._was_entered = True
    assert repr(log) == "no collective was seen"
    log._entries = [one, other]
    assert repr(log) == f"{one}\n{other}"
    assert log.counts() == {"all_reduce": 1, "barrier": 1}
    assert (log.count("send"), log.count("barrier")) == (0, 1)
    assert (log.nbytes("all_reduce"), log.dtypes("all_reduce")) == (25, {f32, torch.int8})
    assert log.of("barrier") == (other,)
    with pytest.raises(AssertionError, match=r"^no send was seen; seen: all_reduce x 1, barrier x 1$"):
        log.of("send")
    with pytest.raises(ValueError, match=r"^expected exactly one, got 2 shapes of "):
        one.shape  # noqa: B018
    assert Collective("x", (f32, f32), ((2,), ()), 0, 2, 0, False).dtype is f32
    assert Collective("x", (f32,), ((2,),), 0, 2, 0, False).shape == (2,)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("broadcast_", "broadcast"),
        ("monitored_barrier_", "monitored_barrier"),
        ("all_gather_into_tensor_out", "all_gather_into_tensor"),
        ("all_gather_into_tensor_coalesced", "all_gather_into_tensor_coalesced"),
        ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    ],
)
def test_an_operator_has_the_name_of_torch_distributed(name: str, spelling: str) -> None:
    assert spelled(name) == spelling
