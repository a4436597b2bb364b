"""Unit tests of messages: what a rank counts of those it sends and receives, and what no rank took up."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.exchanges import plugin, rank
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


class Kind:
    """A class of torch's, or of shm's, with the methods that are seen."""

    def __init__(self, name: str) -> None:
        self.send = lambda *given: (name, "send", given)
        self.recv = lambda *given: (name, "recv", given)
        self.recv_anysource = lambda *given: (name, "recv_anysource", given)
        self.wait = lambda work: f"{name} waited"

    def methods(self) -> dict[str, Any]:
        return {**vars(self)}


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Classes of torch, and of shm, which is not imported yet."""
    backend = SimpleNamespace(registered=[])
    backend.register_backend = lambda *args, **kwargs: backend.registered.append((args, kwargs))
    group, work, of_shm, shm_work = (Kind(name) for name in ("group", "work", "shm", "shm work"))
    world = SimpleNamespace(WORLD=GROUP)
    dist = SimpleNamespace(ProcessGroup=group, Work=work, Backend=backend, group=world)
    monkeypatch.setattr(rank, "dist", dist)
    monkeypatch.delitem(sys.modules, "lockstep.shm", raising=False)
    shm = SimpleNamespace(ShmProcessGroup=of_shm, ShmWork=shm_work)
    return SimpleNamespace(group=group, work=work, backend=backend, shm=shm)


def changed(kind: Kind, before: dict[str, Any]) -> set[str]:
    return {name for name, method in kind.methods().items() if method is not before[name]}


def new_exchanges(registered: list[Any]) -> Exchanges:
    manager: Any = SimpleNamespace(register=registered.append)
    return Exchanges("", lambda: [(GROUP, (4, 5))], manager)  # type: ignore[list-item]


def test_sends_and_receives_are_seen_by_each_of_their_methods(torchs: Any) -> None:
    seen: list[Any] = []
    exchanges = new_exchanges([])
    exchanges._record = lambda *given: seen.append(given)  # type: ignore[method-assign]
    exchanges.install()
    tensors = [torch.ones(2)]
    for name, given in (("send", (1, 3)), ("recv", (1, 3)), ("recv_anysource", (3,))):
        work = getattr(torchs.group, name)(GROUP, tensors, *given)
        assert work == ("group", name, (GROUP, tensors, *given))
    assert [(channel[1:], group) for _, _, channel, group in seen] == [
        ((True, 1, 3), GROUP),
        ((False, 1, 3), GROUP),
        ((False, ANY_RANK, 3), GROUP),
    ]
    assert all(channel[0]() is GROUP and tensor is tensors[0] for _, tensor, channel, _ in seen)


def test_those_of_shm_are_seen_once_it_is_imported(torchs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = new_exchanges([])
    of_group, of_work = torchs.shm.ShmProcessGroup, torchs.shm.ShmWork
    group, work = of_group.methods(), of_work.methods()
    exchanges.install()
    torchs.backend.register_backend("x", a=1)
    assert changed(of_group, group) == set()
    monkeypatch.setitem(sys.modules, "lockstep.shm", torchs.shm)
    torchs.backend.register_backend("shm", extended_api=True)
    assert torchs.backend.registered == [(("x",), {"a": 1}), (("shm",), {"extended_api": True})]
    assert changed(of_group, group) == {"send", "recv"}
    seen: list[bool] = []
    exchanges._record = lambda work, tensor, channel, group: seen.append(channel[1])  # type: ignore[method-assign]
    for each in (of_group.send, of_group.recv):
        each(GROUP, [torch.ones(2)], 1, 3)
    assert seen == [True, False]
    group = of_group.methods()
    torchs.backend.register_backend("y")
    assert changed(of_group, group) == set()
    assert changed(of_work, work) == set()
    exchanges._see_waits()
    assert changed(of_work, work) == {"wait"}


def test_waits_are_seen_from_the_first_message_on(torchs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    exchanges = new_exchanges(registered)
    of_group, of_work = torchs.work.methods(), torchs.shm.ShmWork.methods()
    exchanges.install()
    assert changed(torchs.work, of_group) == set()
    for _ in range(2):
        begin(exchanges, 1, 0)
    (plugin,) = registered
    assert isinstance(plugin, ExchangesOfTest)
    assert plugin._exchanges is exchanges
    assert changed(torchs.work, of_group) == {"wait"}
    assert torchs.work.wait(Work()) == "work waited"
    monkeypatch.setitem(sys.modules, "lockstep.shm", torchs.shm)
    exchanges._see_shm()
    assert changed(torchs.shm.ShmWork, of_work) == {"wait"}


def test_messages_of_the_world_and_of_unknown_groups_have_a_name(torchs: Any) -> None:
    exchanges = new_exchanges([])
    exchanges._sees_waits = True
    kept = [begin(exchanges, 1, 0), begin(exchanges, 1, 0, group=OTHER)]
    found = list(exchanges._exchanged.values())
    assert [(each.group, each.peer) for each in found] == [(DEFAULT_GROUP, 5), ("7", 1)]
    exchanges.pytest_ranks_regrouped()
    assert (exchanges.take(), exchanges._exchanged, len(exchanges._works)) == ((), {}, 0)
    assert len(kept) == 2


def test_what_a_device_sends_needs_no_wait(exchanges: Exchanges) -> None:
    isend = exchanges._recorded(lambda *_: Work(), is_send=True)  # type: ignore[arg-type,return-value]
    isend(GROUP, [torch.ones(2, device="meta")], 1, 0)
    (channel,) = exchanges.take()
    assert (channel.begun, channel.waited) == (1, 1)


def test_messages_are_seen_on_ranks_whose_backend_connects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[str] = []
    plugin.pytest_ranks_imports(hints)
    assert hints == ["lockstep.features.exchanges.rank"]
    installed: list[Exchanges] = []
    monkeypatch.setattr(Exchanges, "install", lambda self: installed.append(self))

    def configure(backend: str | None) -> tuple[list[Any], list[Any]]:
        registered: list[Any] = []
        parts: list[Any] = []
        of_rank = SimpleNamespace(
            spec=SimpleNamespace(session=SimpleNamespace(cwd="/w")),
            group=SimpleNamespace(members=list),
            status=SimpleNamespace(add_part=lambda *given: parts.append(given)),
        )
        session = (
            None if backend is None else SimpleNamespace(world=SimpleNamespace(backend=backend), rank=of_rank)
        )
        manager = SimpleNamespace(get_plugin=lambda name: session, register=registered.append)
        plugin.pytest_configure(SimpleNamespace(pluginmanager=manager))  # type: ignore[arg-type]
        return registered, parts

    assert configure(None) == configure("fake") == ([], [])
    (exchanges,), ((name, current),) = configure("gloo")
    assert installed == [exchanges]
    assert (name, current, exchanges._base) == (FEATURE, exchanges.current, "/w")


def test_a_message_is_named_by_the_function_and_the_line_of_the_user(
    exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch: dict[str, Any] = {}
    code = "def isend(send, *given):\n    send(*given)\n\ndef wrapper(*given):\n    isend(*given)\n"
    exec(compile(code, "/torch/distributed.py", "exec"), of_torch)
    monkeypatch.setattr(rank, "is_installed", lambda file: file.startswith("/torch/"))
    work = Work()
    send = exchanges._recorded(lambda *_: work, is_send=True)  # type: ignore[arg-type,return-value]
    line = sys._getframe().f_lineno + 1
    of_torch["wrapper"](send, GROUP, [torch.ones(2)], 1, 0)
    (channel,) = exchanges.take()
    assert (channel.call, channel.line) == ("isend", f"test_messages.py:{line}")


def test_only_waits_of_the_main_thread_are_waited_for(exchanges: Exchanges) -> None:
    met: list[bool] = []
    wait = exchanges._waiting(lambda work: met.append(exchanges._awaited is None) or True)  # type: ignore[func-returns-value]
    thread = threading.Thread(target=wait, args=(begin(exchanges, 1, 0),), daemon=True)
    thread.start()
    thread.join()
    assert met == [True]


def test_a_wait_may_fail_after_all_is_forgotten(exchanges: Exchanges) -> None:
    def fail(work: object) -> bool:
        exchanges.clear()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        exchanges._waiting(fail)(begin(exchanges, 1, 0))  # type: ignore[arg-type]
    assert exchanges._exchanged == {}


def test_a_world_is_used_again_only_if_all_messages_are_over(exchanges: Exchanges) -> None:
    kept = [begin(exchanges, 1, 0, work=Work(True)), begin(exchanges, 0, 0)]
    ending = Ending(True)
    ExchangesOfTest(exchanges).pytest_ranks_finished(ending)
    assert [each.waited for each in ending.parts[FEATURE]] == [1, 0]
    assert (ending.usable, len(kept)) == (False, 2)


def test_threads_of_services_and_of_shm_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [threading.Thread(name=name) for name in ("shm-progress", "service")]
    running = [threading.main_thread(), threading.current_thread(), *others]
    monkeypatch.setattr(rank.threading, "enumerate", lambda: running)
    monkeypatch.setattr(rank, "is_service", lambda thread: thread.name == "service")
    assert not rank._may_be_helped()
    running.append(threading.Thread(name="mine"))
    assert rank._may_be_helped()
