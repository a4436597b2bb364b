"""A rank's end of its connection to the controller, in this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.exceptions import MessageRefused
from lockstep.protocol import Agreed, Close, Interrupt, Part
from lockstep.rank.wire import LOOK_EVERY, WIRE_THREAD, Wire

SOON = 20.0
"""Seconds for what takes some milliseconds; a busy machine may take longer."""


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Wire]]:
    """The controller's end of a connection, and that of rank 1."""
    controller, rank = multiprocessing.Pipe()
    with controller, rank:
        yield controller, Wire(rank, 1, end_child=lambda: None)


@pytest.fixture
def listening(ends: tuple[Connection, Wire], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Messages that a listening rank has handled; at last its controller goes, and it ends its group."""
    controller, wire = ends
    handled: list[object] = []
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: ended.append((group, number)))
    before = set(threading.enumerate())
    wire.listen(handled.append)
    [thread] = [each for each in threading.enumerate() if each not in before and each.name == WIRE_THREAD]
    yield handled
    controller.close()
    thread.join(SOON)
    assert not thread.is_alive()
    assert ended == [(0, signal.SIGKILL)]


class _SendsWhilePickled:
    """As an object whose finaliser logs while a message is pickled."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send

    def __reduce__(self) -> Any:
        self._send()
        return str, ("pickled",)


def test_what_is_sent_while_a_message_is_pickled_comes_after_it(ends: tuple[Connection, Wire]) -> None:
    controller, wire = ends
    later = Part("later", 2)
    wire.send(Part("first", _SendsWhilePickled(lambda: wire.send(later))))
    assert controller.recv() == (Part("first", "pickled"),)
    assert controller.recv() == (later,)
    assert not controller.poll()


def test_what_was_posted_goes_with_the_next_that_is_sent(ends: tuple[Connection, Wire]) -> None:
    controller, wire = ends
    wire.post(Part("posted", 1))
    assert not controller.poll()
    wire.send(Part("sent", 2))
    assert controller.recv() == (Part("posted", 1), Part("sent", 2))
    wire.send(Part("again", 3))
    assert controller.recv() == (Part("again", 3),)


def test_a_message_that_cannot_be_pickled_stops_no_later_one(ends: tuple[Connection, Wire]) -> None:
    controller, wire = ends
    with pytest.raises(TypeError, match="pickle"):
        wire.send(Part("a lock", threading.Lock()))
    wire.send(Part("later", 2))
    assert controller.recv() == (Part("later", 2),)


def test_a_forked_child_ends_before_anything_is_sent() -> None:
    ended: list[str] = []
    controller, rank = multiprocessing.Pipe()
    with controller, rank:
        wire = Wire(rank, 1, end_child=lambda: ended.append("child"))
        wire.post(Part("posted", 1))
        assert ended == ["child"]
        wire.send(Part("sent", 2))
        assert ended == ["child", "child"]


def test_an_idle_rank_ends_once_it_is_over(ends: tuple[Connection, Wire]) -> None:
    _, wire = ends
    looks = iter([False, None, True])
    assert wire.next_order(lambda: next(looks)) == Close()
    assert not list(looks)


def test_messages_are_handled_and_kept_by_kind(
    ends: tuple[Connection, Wire], listening: list[object]
) -> None:
    controller, wire = ends
    assert wire.next_answer(within=0.01) is None
    order, answer, part = Close(), Agreed(()), Part("of a feature", 1)
    controller.send(answer)
    controller.send(part)
    assert wire.next_answer(SOON) == answer
    assert not wire.is_interrupted
    controller.send(Interrupt())
    controller.send(order)
    assert wire.next_order() == order
    assert wire.is_interrupted
    assert listening == [answer, part, Interrupt(), order]


def test_orders_wait_for_a_rank_that_looks_whether_it_is_over(
    ends: tuple[Connection, Wire], listening: list[object]
) -> None:
    controller, wire = ends
    threading.Timer(2.5 * LOOK_EVERY, controller.send, (Close(),)).start()
    looks: list[None] = []
    assert wire.next_order(lambda: looks.append(None)) == Close()
    assert looks
    assert listening == [Close()]


def test_a_refused_message_is_written_before_the_rank_ends(
    ends: tuple[Connection, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wire = ends
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "write", lambda *given: done.append(given))
    monkeypatch.setattr(os, "killpg", lambda *given: done.append(given))
    for error in (MessageRefused("of another version"), EOFError("end")):
        refusing: Any = SimpleNamespace(recv=Mock(side_effect=error))
        monkeypatch.setattr(wire, "_connection", refusing)
        wire._receive(print)
    end = (0, signal.SIGKILL)
    assert done == [(2, b"rank 1: of another version\n"), end, end]


def test_a_child_closes_its_connection_once(ends: tuple[Connection, Wire]) -> None:
    controller, wire = ends
    wire.leave_to_rank()
    wire.leave_to_rank()
    with pytest.raises(EOFError):
        controller.recv()


def test_an_order_is_awaited_without_a_question(ends: tuple[Connection, Wire]) -> None:
    _, wire = ends
    wire._orders.put(Close())
    assert wire.next_order() == Close()
