"""Schedules, and what a rank does under one, without ranks: delays, copies in flight, subtests of seeds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lockstep.exceptions import CollectiveRace
from lockstep.features.injection import skew
from lockstep.features.injection.calls import Call
from lockstep.features.injection.schedule import Schedule, is_seed
from lockstep.features.injection.skew import Flight, Skew
from lockstep.features.injection.work import Watched
from lockstep.recorders.collectives import Collective

# Schedules


@pytest.mark.parametrize(
    ("text", "schedule", "words"),
    [
        ("7", Schedule(7, 3.0), "7"),
        ("0:3", Schedule(0, 3.0), "0"),
        ("7:2.5", Schedule(7, 2.5), "7:2.5"),
        (f"{2**64 - 1}:60000", Schedule(2**64 - 1, 60000.0), f"{2**64 - 1}:60000"),
    ],
)
def test_a_schedule_is_read_and_written(text: str, schedule: Schedule, words: str) -> None:
    assert Schedule.parse(text) == schedule
    assert str(schedule) == words


@pytest.mark.parametrize("text", [str(2**64), "1:60001", "1:-1"])
def test_a_schedule_beyond_the_bounds_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^'{text}': a seed is from 0 to 2\*\*64 - 1, a delay above 0 and at"
    ):
        Schedule.parse(text)


DRAWN = {
    (0, 2, "before"): 0.0,
    (0, 2, "after"): 0.002181,
    (1, 1, "before"): 0.0,
    (1, 1, "after"): 0.018818,
    (1, 2, "before"): 0.016507,
    (1, 2, "after"): 0.000597,
}


def test_delays_are_those_of_earlier_versions() -> None:
    assert {point: round(Schedule(7, 20).delay(*point), 6) for point in DRAWN} == DRAWN
    assert [is_seed(each) for each in (0, 2**64 - 1, -1, 2**64, True, 1.0)] == [True] * 2 + [False] * 4


# A rank under a schedule


def call_of(written: list[Tensor], read: list[Tensor], **given: Any) -> Call:
    about = Collective("all_gather", (torch.float32,), ((2,),), 8, 2, 0, False)
    fields: dict[str, Any] = {"in_place": False, "is_async": True, "is_batched": False, **given}
    return Call(about=about, group=Mock(), written=written, read=read, result=written, **fields)


class Skewed:
    """A rank under a schedule, whose delays are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delays: list[tuple[int, int, str]] = []
        self.slept: list[float] = []
        schedule: Any = SimpleNamespace(delay=self._delay)
        self.skew = Skew(schedule, 3)
        monkeypatch.setattr(skew.time, "sleep", self.slept.append)
        monkeypatch.setattr(skew, "caller", lambda: "test_x.py:3")

    def _delay(self, rank: int, number: int, point: str) -> float:
        self.delays.append((rank, number, point))
        return 0.5 if point == "before" else 0.0

    def run(self, call: Call) -> Watched:
        def run(written: Any, read: Any) -> None:
            self.given = written, read
            for each in written:
                each.fill_(9)

        work = self.skew._run(call, run)
        assert isinstance(work, Watched)
        return work


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> Skewed:
    return Skewed(monkeypatch)


@pytest.mark.parametrize("given", [{"is_async": False}, {"is_batched": True}])
def test_a_collective_that_is_waited_for_at_once_runs_on_its_own_tensors(
    skewed: Skewed, given: dict[str, bool]
) -> None:
    call = call_of([torch.ones(2)], [torch.ones(2)], **given)
    work = skewed.run(call)
    assert skewed.given[0][0] is call.written[0]
    assert skewed.given[1][0] is call.read[0]
    assert skewed.delays == [(3, 1, "before")]
    work.wait()
    work.wait()
    assert skewed.delays[1:] == [(3, 1, "waited")] * 2
    assert skewed.slept == [0.5]
    skewed.run(call)
    assert skewed.delays[3:] == [(3, 2, "before")]


def test_a_collective_in_flight_runs_on_copies_until_it_is_waited_for(skewed: Skewed) -> None:
    written, read = torch.ones(2), torch.tensor([3.0, 4.0])
    work = skewed.run(call_of([written], [read]))
    copies = skewed.given
    assert copies[0][0] is not written
    assert copies[1][0] is not read
    assert copies[1][0].tolist() == [3.0, 4.0]
    assert written.isnan().all()
    assert skewed.skew._in_flight.is_any()
    assert skewed.delays == [(3, 1, "before"), (3, 1, "after")]
    work.wait()
    assert written.tolist() == [9.0, 9.0]
    assert not skewed.skew._in_flight.is_any()
    assert skewed.delays[2:] == [(3, 1, "waited")]


TITLE = "all_gather #1 (float32[2], 2 ranks), begun at test_x.py:3"


def test_operations_of_torch_that_come_too_early_are_races(skewed: Skewed) -> None:
    written, read, plain = torch.ones(2), torch.ones(2), torch.ones(2)
    dispatch = skewed.skew.__torch_dispatch__
    add: Any = torch.ops.aten.add.Tensor
    assert dispatch(add, (), (written, 1)).tolist() == [2.0, 2.0]
    skewed.run(call_of([written], [read]))
    assert dispatch(add, (), (plain, 1), {"alpha": 2}).tolist() == [3.0, 3.0]
    assert dispatch(add, (Tensor,), (read, 1)).tolist() == [2.0, 2.0]
    early = f"{TITLE}, was not waited for before `aten.add` read its output at test_x.py:3"
    with pytest.raises(CollectiveRace) as raced:
        dispatch(add, (), (written, 1))
    assert str(raced.value) == early
    flat = SimpleNamespace(__tensor_flatten__=None)
    assert dispatch(add, (Tensor, flat), (plain, 1)) is NotImplemented
    waits = Mock(return_value="waited")
    waits.overloadpacket.__name__ = "wait_tensor"
    skewed.skew._in_flight = Mock(is_any=lambda: True)
    assert dispatch(waits, (), (written,)) == "waited"
    skewed.skew._in_flight.check.assert_not_called()


def test_what_a_schedule_disturbs_is_as_before_behind_it(
    skewed: Skewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def layer(run: Any) -> Iterator[None]:
        assert run == skewed.skew._run
        done.append("layer")
        yield
        done.append("no layer")

    @contextlib.contextmanager
    def callbacks(delay: Any) -> Iterator[None]:
        delay()
        delay()
        yield

    forget = Mock(side_effect=lambda: done.append("forgets"))
    monkeypatch.setattr(skew, "INTERCEPTION", SimpleNamespace(layer=layer, forget=forget))
    monkeypatch.setattr(skew, "delayed_callbacks", callbacks)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("resets"))
    monkeypatch.setitem(sys.modules, "torch._dynamo", Mock())
    with skewed.skew.on():
        assert done == ["layer"]
        torch.ones(1)
    assert done == ["layer", "no layer", "forgets", "resets"]
    assert skewed.delays == [(3, 1, "callback"), (3, 2, "callback")]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    skew._forget_uncompiled()
    assert done[4:] == []


def landing(call: Call) -> Flight:
    return Flight(call, "all_gather #1, begun at x.py:1")


def refused(flight: Flight) -> str:
    with pytest.raises(CollectiveRace) as raced:
        flight.land()
    head, _, rest = str(raced.value).partition(" before it was waited for, at ")
    assert rest
    return head.removeprefix("all_gather #1, begun at x.py:1: ")


def test_tensors_that_were_touched_in_flight_are_named() -> None:
    def tensors() -> tuple[Call, Tensor, Tensor]:
        written, read = torch.ones(2), torch.ones(3, dtype=torch.int64)
        return call_of([torch.zeros(0), written], [torch.ones(1), read]), written, read

    call, written, read = tensors()
    landing(call).land()
    flight = landing(call)
    read[2] = 5
    assert refused(flight) == "its input was overwritten (int64[3])"
    call, written, read = tensors()
    flight = landing(call)
    written[1] = 5
    assert refused(flight) == "its output was written to (float32[2])"
    call, written, read = tensors()
    flight = landing(call)
    read.set_(torch.ones(3, dtype=torch.int64))  # type: ignore[call-overload]
    assert refused(flight) == "the memory of its input was freed (int64[3])"
    call, written, read = tensors()
    flight = landing(call)
    written.untyped_storage().resize_(0)
    assert refused(flight) == "the memory of its output was freed (float32[2])"


def test_the_result_is_put_in_its_place_on_landing() -> None:
    written = torch.ones(2)
    flight = landing(call_of([written], []))
    version = written._version
    flight.written[0].fill_(4.0)
    flight.land()
    assert written.tolist() == [4.0, 4.0]
    assert written._version == version


def test_a_collective_in_place_sends_copies_of_what_it_writes() -> None:
    tensor = torch.ones(2)
    flight = landing(call_of([tensor], [], in_place=True))
    assert flight.written[0].tolist() == [1.0, 1.0]
    other = torch.ones(2)
    assert landing(call_of([other], [])).written[0].data_ptr() != other.data_ptr()


def test_an_input_that_is_a_part_of_the_output_may_change() -> None:
    whole = torch.ones(4)
    flight = landing(call_of([whole], [whole[:2]]))
    assert whole.isnan().all()
    assert flight.read[0].tolist() == [1.0, 1.0]
    flight.land()
    apart = torch.ones(4)
    flight = landing(call_of([apart[:2]], [apart[2:]]))
    apart[3] = 5.0
    assert refused(flight) == "its input was overwritten (float32[2])"


def test_a_tensor_that_cannot_be_copied_travels_itself() -> None:
    strided, sparse = torch.ones(4)[::2], torch.eye(2).to_sparse()
    flight = landing(call_of([strided, sparse], [strided, sparse]))
    assert flight.written[0] is flight.read[0] is strided
    assert flight.written[1] is flight.read[1] is sparse
    assert strided.tolist() == [1.0, 1.0]
    strided[0] = 2.0
    flight.land()


def test_a_tensor_has_memory_for_all_its_elements() -> None:
    tensor = torch.ones(6)
    storage = tensor.untyped_storage()
    tail = tensor[4:]
    assert skew._has_memory(tensor)
    assert skew._has_memory(tail)
    storage.resize_(23)
    assert not skew._has_memory(tensor)
    assert not skew._has_memory(tail)
    assert skew._has_memory(tensor[:5])
    assert skew._has_memory(tensor[6:])
    assert skew._has_memory(torch.eye(2).to_sparse())


def test_memory_that_only_touches_does_not_overlap() -> None:
    tensor = torch.ones(6)
    found = [
        skew._overlaps(tensor[2:4], [tensor[:start], tensor[end:]]) for start, end in ((2, 4), (3, 4), (2, 3))
    ]
    assert found == [False, True, True]
