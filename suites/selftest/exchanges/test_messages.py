"""Unit tests of messages: what a rank counts of those it sends and receives, and what no rank took up."""

from __future__ import annotations

import math
import re
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.exchanges import rank
from lockstep.features.exchanges.plugin import (
    ANY_RANK,
    FEATURE,
    Exchanged,
    Exchanging,
    find_unpaired,
    pytest_ranks_outcome,
)
from lockstep.features.exchanges.rank import Exchanges, ExchangesOfTest
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.hookspecs import Ending
from lockstep.protocol import Finished, Issued, RankStatus
from lockstep.world.outcome import ItemOutcome, RankOutcome


def received(begun: int = 1, **changes: Any) -> Exchanged:
    usual = {"group": DEFAULT_GROUP, "is_send": False, "peer": 1, "tag": 0, "waited": 0, "failed": 0}
    return Exchanged(begun=begun, call="recv", tensor="float32 [3]", line="a.py:7", **(usual | changes))


SENT = {"is_send": True, "peer": 0}


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (received(), received(**SENT), {}),
        (
            received(),
            received(tag=1, **SENT),
            {0: "recv from rank 1 (float32 [3]) at a.py:7 in flight: it was not sent"},
        ),
        (
            received(2, is_send=True, waited=1),
            received(peer=0),
            {0: "recv to rank 1 (float32 [3]) at a.py:7 in flight: it was not received"},
        ),
        (received(2, is_send=True, waited=2), received(peer=0), {}),
        (received(2, is_send=True, waited=1, failed=1), received(peer=0), {}),
        (received(2, is_send=True), received(2, peer=0), {}),
        (
            received(peer=ANY_RANK),
            received(**SENT, group="7", waited=1),
            {0: "recv from any rank (float32 [3]) at a.py:7 in flight: it was not sent"},
        ),
        (received(peer=ANY_RANK), received(**SENT), {}),
        (
            received(peer=5),
            received(waited=1),
            {0: "recv from rank 5 (float32 [3]) at a.py:7 in flight: it was not sent"},
        ),
    ],
)
def test_what_no_rank_took_up_is_left(first: Exchanged, second: Exchanged, left: dict[int, str]) -> None:
    found = find_unpaired({0: [first], 1: [second]})
    assert {rank: text for rank, text in found.items() if rank == 0} == left


def outcome_of(
    *ranks: RankOutcome, has_lost: bool = False, status: RankStatus | None = None
) -> list[str | None]:
    """Return what ranks of an item have left in flight."""
    asked = {} if status is None else {1: status}
    run: Any = SimpleNamespace(has_lost=lambda: has_lost, request_statuses=lambda ended: asked)
    outcome = ItemOutcome(ranks, 1.0, False, 1.0)
    pytest_ranks_outcome(run, outcome)
    return [rank.left_in_flight for rank in ranks]


def ended(rank: int, *exchanged: Exchanged, collectives: int = 3, **fields: Any) -> RankOutcome:
    parts = {FEATURE: exchanged} if exchanged else {}
    return RankOutcome(rank, fate=Finished(True, collectives, 0, parts=parts), **fields)


def test_a_message_is_left_where_all_ranks_in_the_world_have_passed() -> None:
    left = "recv from rank 1 (float32 [3]) at a.py:7 in flight: it was not sent"
    assert outcome_of(ended(0, received()), ended(1)) == [left, None]
    failed = [{"outcome": "failed", "$report_type": "TestReport"}]
    assert outcome_of(ended(0, received()), ended(1, reports=failed)) == [None, None]
    gone = RankOutcome(1, has_left_world=True)
    assert outcome_of(ended(0, received()), gone) == [left, None]
    assert outcome_of(ended(0), ended(1)) == [None, None]


def test_a_collective_is_left_where_ranks_have_begun_unequally_many() -> None:
    issued = Issued(DEFAULT_GROUP, (), 3, "all_reduce", (), (), True)
    status = RankStatus("", "", issued=(issued,))
    unequal = lambda: (ended(0), ended(1, collectives=4))  # noqa: E731
    (_, left) = outcome_of(*unequal(), status=status)
    assert left is not None
    assert left.startswith("all_reduce #3")
    assert left.endswith(" in flight: not every rank has joined it")
    assert outcome_of(ended(0), ended(1), status=status) == [None, None]
    assert outcome_of(*unequal(), status=status, has_lost=True) == [None, None]
    other = RankStatus("", "", issued=(replace(issued, group="7"),))
    assert outcome_of(*unequal(), status=other) == [None, None]
    over = RankStatus("", "", issued=(replace(issued, in_flight=False),))
    assert outcome_of(*unequal(), status=over) == [None, None]


class Work:
    """A send or a receive under way."""

    def __init__(self, is_over: bool = False, error: Exception | None = None) -> None:
        self.is_over, self.error = is_over, error

    def is_completed(self) -> bool:
        return self.is_over


class Group:
    group_name = "7"


GROUP = Group()
OTHER = Group()


@pytest.fixture
def exchanges() -> Exchanges:
    manager: Any = SimpleNamespace(register=lambda plugin: None)
    made = Exchanges(str(Path(__file__).parent), lambda: [(GROUP, (4, 5))], manager)  # type: ignore[list-item]
    made._sees_waits = True
    return made


def begin(
    exchanges: Exchanges, *peer_and_tag: int, work: Any = None, group: Any = GROUP, send: bool = True
) -> Work:
    """Begin a send, or a receive, of one tensor; return its handle."""
    made = work or Work()
    isend = exchanges._recorded(lambda *_: made, is_send=send)
    isend(group, [torch.ones(2)], *peer_and_tag)
    return made


def test_messages_are_counted_by_channel(exchanges: Exchanges) -> None:
    assert exchanges.current() is None
    assert exchanges.take() == ()
    kept = [begin(exchanges, 1, 3), begin(exchanges, 1, 3), begin(exchanges, 9, send=False)]
    kept.append(begin(exchanges, 0, 0, group=OTHER))
    (sends, receives) = exchanges.take()
    assert (sends.group, sends.is_send, sends.peer, sends.tag, sends.begun) == ("7", True, 5, 3, 2)
    assert (sends.waited, sends.failed, sends.tensor) == (0, 0, "float32 [2]")
    assert re.fullmatch(r"test_messages\.py:\d+", sends.line)
    assert (receives.is_send, receives.peer, receives.tag, receives.begun) == (False, ANY_RANK, 9, 1)
    assert exchanges.take() == ()


def test_a_wait_that_ends_or_fails_is_counted_once(exchanges: Exchanges) -> None:
    met: list[Any] = []

    def wait_for(work: Work, *args: Any, **kwargs: Any) -> bool:
        met.append((exchanges._awaited is not None, args, kwargs))
        if work.error:
            raise work.error
        return True

    wait = exchanges._waiting(wait_for)  # type: ignore[arg-type]
    waited, failed, over, dropped = (
        begin(exchanges, 1, 0, work=work)
        for work in (Work(), Work(error=ValueError("no")), Work(is_over=True), Work())
    )
    for _ in range(2):
        assert wait(waited, 3, a=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        wait(failed)  # type: ignore[arg-type]
    assert met == [(True, (3,), {"a": 4}), (False, (3,), {"a": 4}), (True, (), {})]
    assert exchanges._awaited is None
    (channel,) = exchanges.take()
    assert (channel.begun, channel.waited, channel.failed) == (4, 2, 1)
    assert over.is_over > dropped.is_over
    ending = Ending(True)
    ExchangesOfTest(exchanges).pytest_ranks_finished(ending)
    assert (ending.parts, ending.usable) == ({}, True)


@pytest.mark.parametrize(("is_over", "usable"), [(True, True), (False, False)])
def test_a_world_with_a_message_under_way_is_not_used_again(
    exchanges: Exchanges, is_over: bool, usable: bool
) -> None:
    work = begin(exchanges, 1, 0, work=Work(is_over))
    ending = Ending(True)
    ExchangesOfTest(exchanges).pytest_ranks_finished(ending)
    assert ending.usable is usable
    (channel,) = ending.parts[FEATURE]
    assert channel.waited == work.is_over


def test_what_the_main_thread_waits_for_is_said_if_no_thread_may_help(
    exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "_may_be_helped", lambda: False)
    found: list[Exchanging | None] = []

    def look(*_: object, **__: object) -> bool:
        found.append(exchanges.current())
        return True

    wait = exchanges._waiting(look)
    for timeout in ({"timeout": timedelta(seconds=5)}, {}):
        begin_at = begin(exchanges, 1, 0)
        monkeypatch.setattr(rank, "_timeout_of", lambda group: timedelta(seconds=7))
        wait(begin_at, **timeout)  # type: ignore[arg-type]
    first, second = found
    assert first is not None
    assert second is not None
    assert (first.begun, first.timeout, second.timeout) == ({("7", True, 5, 0): 1}, 5.0, 7.0)
    assert first.awaited is not None
    assert second.awaited is not None
    assert (first.awaited.begun, second.awaited.begun) == (1, 2)
    idle = exchanges.current()
    assert idle == Exchanging({("7", True, 5, 0): 2}, None, 0.0)
    monkeypatch.setattr(rank, "_may_be_helped", lambda: True)
    last = begin(exchanges, 1, 0)
    wait(last)  # type: ignore[arg-type]
    assert found[-1] == Exchanging({("7", True, 5, 0): 3}, None, 0.0)


def test_a_wait_ends_with_its_timeout_or_an_alarm_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank._seconds_left(None) == math.inf
    assert rank._seconds_left(timedelta(seconds=90)) == 90.0
    monkeypatch.setattr(signal, "getitimer", lambda which: (20.0, 0.0))
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    assert rank._seconds_left(timedelta(seconds=90)) == 90.0
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    assert rank._seconds_left(timedelta(seconds=90)) == 20.0
    assert rank._seconds_left(timedelta(seconds=9)) == 9.0
    assert rank._timeout_of(None) is None
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=3)))
    group: Any = SimpleNamespace(_get_backend=lambda device: backend if device.type == "cpu" else None)
    assert rank._timeout_of(group) == timedelta(seconds=3)
    group._get_backend = lambda device: None
    assert rank._timeout_of(group) is None


def test_another_thread_of_the_test_may_help() -> None:
    go = threading.Event()

    def helps(name: str) -> bool:
        thread = threading.Thread(target=go.wait, name=name, daemon=True)
        thread.start()
        try:
            return rank._may_be_helped()
        finally:
            go.set()
            thread.join()
            go.clear()

    assert helps("mine")
    assert helps("shm-progress") == rank._may_be_helped()
