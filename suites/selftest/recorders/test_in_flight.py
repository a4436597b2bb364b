"""Unit tests of the record of collectives in flight: who touches their tensors before a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.recorders.in_flight import InFlight, _handles_data, _meet, _span

ATEN: Any = torch.ops.aten


class Met:
    """A record, and what it has reported."""

    def __init__(self) -> None:
        self.waited: list[tuple[str, int, str]] = []
        self.raced: list[tuple[str, str, str]] = []
        self.flight = InFlight(
            lambda title, written, line: self.waited.append((title, len(written), line)),
            lambda title, line, verb, func: self.raced.append((title, line, verb)),
        )


class OwnWork(dist.Work):
    """A handle with methods of its own."""

    is_over = True

    def wait(self, *args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_over

    def get_future(self) -> Any:
        return "a future"


@pytest.fixture
def met() -> Met:
    return Met()


def test_tensors_of_a_collective_in_flight_are_watched(met: Met) -> None:
    read, written, other = torch.ones(4), torch.ones(4), torch.ones(4)
    met.flight.watch(OwnWork(), [read], [written], "all_gather", "a.py:1")
    check = met.flight.check
    check(ATEN.add.Tensor, (other, other), {})
    check(ATEN.add.Tensor, (read, other), {})
    check(ATEN.view.default, (written, [4]), {})
    assert met.raced == []
    check(ATEN.add.Tensor, (other, written[3:]), {})
    check(ATEN.add.Tensor, (other, written), {})
    assert met.raced == [("all_gather", "a.py:1", "read its output")]


def test_writes_to_tensors_that_are_read_come_too_early(met: Met) -> None:
    read, other = torch.ones(4), torch.ones(4)
    met.flight.watch(OwnWork(), [read], [other], "all_reduce", "a.py:1")
    met.flight.check(ATEN.add_.Tensor, (read[:1], 1), {})
    assert met.raced == [("all_reduce", "a.py:1", "wrote to its tensors")]
    met.raced.clear()
    met.flight.watch(OwnWork(), [read], [other], "later", "b.py:1")
    met.flight.check(ATEN.add.out, (other, 1), {"out": torch.ones(4)})
    assert met.raced == [("later", "b.py:1", "read its output")]
    met.flight.watch(OwnWork(), [read], [other], "last", "c.py:1")
    met.flight.check(ATEN.cat.default, ([torch.ones(1), [other]],), {})
    assert met.raced[1:] == [("last", "c.py:1", "read its output")]


def test_a_wait_ends_a_collective_with_its_tensors(met: Met) -> None:
    before = OwnWork.wait
    tensor = torch.ones(4)
    with met.flight:
        assert OwnWork.wait is not before
        work, left = OwnWork(), OwnWork()
        met.flight.watch(work, [], [tensor], "one", "a.py:1")
        assert met.flight.is_any()
        assert work.wait(3)
        assert work.wait()
        assert met.waited == [("one", 1, "a.py:1")]
        met.flight.check(ATEN.add.Tensor, (tensor, 1), {})
        assert met.raced == []
        met.flight.watch(left, [], [tensor], "left", "b.py:1")
    assert OwnWork.wait is before
    assert not met.flight.is_any()


def test_a_question_that_is_answered_no_ends_nothing(met: Met) -> None:
    with met.flight:
        work = OwnWork()
        met.flight.watch(work, [], [torch.ones(1)], "one", "a.py:1")
        work.is_over = False
        assert not work.is_completed()
        assert (met.flight.is_any(), met.waited) == (True, [])
        work.is_over = True
        assert work.is_completed()
        assert (met.flight.is_any(), met.waited) == (False, [("one", 1, "a.py:1")])
        met.flight.watch(work, [], [torch.ones(1)], "two", "a.py:1")
        assert work.get_future() == "a future"
        assert met.waited[1:] == [("two", 0, "a.py:1")]
        met.flight.watch(work, [], [torch.ones(1)], "three", "a.py:1")
        met.flight.forget(work)
        met.flight.forget(work)
        work.wait()
        assert len(met.waited) == 2


def test_a_method_that_another_has_wrapped_since_stays() -> None:
    before, after = OwnWork.wait, lambda self: True
    try:
        with InFlight(lambda *_: None, lambda *_: None):
            OwnWork.wait = after  # type: ignore[method-assign]
        assert OwnWork.wait is after
    finally:
        OwnWork.wait = before  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("func", "handles"),
    [
        (ATEN.add.Tensor, True),
        (ATEN.view.default, False),
        (ATEN.empty.memory_format, False),
        (ATEN.new_empty.default, False),
        (ATEN.ones_like.default, False),
        (ATEN.resize_.default, False),
    ],
)
def test_operators_without_data_touch_nothing(func: Any, handles: bool) -> None:
    assert _handles_data(func) is handles


def test_the_memory_of_a_tensor_ends_with_its_last_element() -> None:
    tensor = torch.zeros(4, 6)
    start = tensor.data_ptr()
    assert _span(tensor) == (start, start + 96)
    assert _span(tensor[1:3, 2:4]) == (start + 32, start + 64)
    assert _span(tensor.t()) == (start, start + 96)
    assert _span(torch.zeros(0)) == _span(torch.zeros(1, device="meta")) == (0, 0)
    assert _span(torch.zeros(2).to_sparse()) == (0, 0)


def test_memory_that_only_touches_does_not_meet() -> None:
    spans = [(10, 20), (30, 40)]
    found = [_meet(span, spans) for span in ((20, 30), (0, 10), (19, 21), (9, 11), (35, 36), (0, 0))]
    assert found == [False, False, True, True, True, False]
    assert not _meet((0, 9), [])
