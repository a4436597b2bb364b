"""Connections without the secret: there are few, each ends soon, and none of them ends a listener."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.hosts import listener as listeners
from lockstep.features.hosts import wire
from lockstep.features.hosts.hosts_file import HostInfo
from lockstep.features.hosts.join_info import JoinInfo, Known
from lockstep.features.hosts.launchers import NodePlace
from lockstep.features.hosts.listener import MOST_UNPROVEN, PAUSE, Listener
from lockstep.features.hosts.rendezvous import Comer, Rendezvous
from lockstep.features.hosts.wire import RUN, Call, Credentials, Purpose, connect, listen
from suites.selftest.project import wait_for

HERE = "127.0.0.1"
CREDENTIALS = Credentials(b"the secret of the run", b"r" * RUN)
FEW = 64
"""Descriptors of a process that has few."""


@contextlib.contextmanager
def listener(admitted: list[object]) -> Iterator[Listener]:
    serving = Listener(listen(HERE), 1, CREDENTIALS, ("control",), lambda *each: admitted.append(each[0]))
    stop, stopped = socket.socketpair()
    thread = threading.Thread(target=serving.serve, args=(stopped,))
    thread.start()
    yield serving
    stop.close()
    thread.join(60)
    stopped.close()
    serving.close()


def test_few_connections_are_without_a_proof_and_the_oldest_give_way() -> None:
    admitted: list[object] = []
    with listener(admitted) as serving, contextlib.ExitStack() as stack:
        for _ in range(3 * MOST_UNPROVEN):
            stack.enter_context(last := socket.create_connection((HERE, serving.port), timeout=60))
            assert len(serving._unproven) <= MOST_UNPROVEN
        last.recv(1)
        with connect(Call(Purpose("control"), 0, 1, HERE, serving.port), CREDENTIALS):
            assert len(serving._unproven) < MOST_UNPROVEN
    assert len(admitted) == 1


def test_the_whole_proof_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a place."""
    monkeypatch.setattr(wire, "PROVE_WITHIN", 0.5)
    with listener([]) as serving, socket.create_connection((HERE, serving.port), timeout=60) as peer:
        assert len(peer.recv(1000)) == RUN + 32
        peer.settimeout(0.05)
        until = time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                peer.send(b"\0")
                with contextlib.suppress(TimeoutError):
                    assert peer.recv(1) == b""
                    break
        assert time.monotonic() < until


def test_a_meeting_goes_on_after_its_process_had_no_descriptor_left(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_meet, args=(theirs, tmp_path))
    process.start()
    theirs.close()
    join_info: JoinInfo = ours.recv()
    with contextlib.ExitStack() as stack:
        for _ in range(FEW):
            stack.enter_context(socket.create_connection((HERE, join_info.port), timeout=60))
        ours.send("they are there")
        assert ours.recv() > 2 * PAUSE  # for three attempts to accept one
        for _ in range(FEW):
            stack.enter_context(socket.create_connection((HERE, join_info.port), timeout=60))
        host = HostInfo("b", HERE)
        comer = Comer(NodePlace(1, 2), Known(join_info), lambda *_: host, print, is_by_hand=False)
        stack.enter_context(comer.come(60).connection)
        assert ours.recv() == ["a", "b"]
        process.join(60)


def _meet(test: Connection, path: Path) -> None:
    """Lead a rendezvous in a process that has no descriptor for a while, and few after that."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))
    place, this = NodePlace(0, 2), HostInfo("a", HERE)
    rendezvous = Rendezvous(place, this, JoinInfo(HERE, 0, CREDENTIALS.secret), path / "hosts.json", {})
    times, accept = [], rendezvous._listener._accept

    def timed() -> bool:
        times.append(time.monotonic())
        return accept()

    rendezvous._listener._accept = timed  # type: ignore[method-assign]
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    test.send(rendezvous.join_info)
    test.recv()
    wait_for(lambda: len(times) > 2, "it has tried three times", 60)
    test.send(times[2] - times[0])
    for each in taken[:8]:  # fewer than may be without a proof: the oldest give way, for want of more
        os.close(each)
    wait_for(lambda: len(rendezvous._hosts) == 2, "host b has come", 60)
    for each in taken[8:]:
        os.close(each)
    test.send([host.name for host in rendezvous.await_all(60, print)])
    rendezvous.end(0)


class Proof:
    """A connection on its way to a proof."""

    def __init__(self, until: float = 0.0, call: object = None) -> None:
        self.until = until
        self.call = call
        self.is_closed = False

    def read(self) -> object:
        if isinstance(self.call, Exception):
            raise self.call
        return self.call

    def answer(self) -> str:
        return "connection"

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def quiet() -> Iterator[Any]:
    """A listener that does not serve, and what it admits."""
    admitted: list[object] = []
    made: Any = Listener(listen(HERE), 1, CREDENTIALS, ("wire", "end"), lambda *each: admitted.append(each))
    made.admitted = admitted
    yield made
    made.close()


def test_a_proof_is_admitted_once_it_is_whole(quiet: Any) -> None:
    call = Call(Purpose("end"), 0, 1, HERE, quiet.port)
    partial, whole, other = Proof(), Proof(call=call), Proof(call=replace(call, callee=2))
    wrong = [Proof(call=replace(call, **change)) for change in WRONG]
    broken = Proof(call=ValueError())
    quiet._unproven[:] = [partial, whole, other, *wrong, broken]
    for each in [*quiet._unproven]:
        quiet._read(each)
    assert quiet._unproven == [partial]
    assert quiet.admitted == [("connection", call)]
    assert [each.is_closed for each in (partial, whole, other, *wrong, broken)] == [False, False, *[True] * 5]


WRONG: tuple[dict[str, Any], ...] = ({"address": "127.0.0.2"}, {"port": 1}, {"purpose": Purpose("control")})


def test_a_connection_that_cannot_be_admitted_is_closed(quiet: Any) -> None:
    def admit(*each: object) -> None:
        raise RuntimeError("can't start new thread")

    quiet._admit = admit
    proof = Proof(call=Call(Purpose("wire"), 0, 1, HERE, quiet.port))
    quiet._unproven.append(proof)
    quiet._read(proof)
    assert (quiet._unproven, proof.is_closed) == ([], True)


def test_connections_are_given_up_in_their_order(quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "monotonic", lambda: 10.0)
    assert quiet._patience() is None
    first, second = Proof(12.5), Proof(20.0)
    quiet._unproven[:] = [first, second]
    assert quiet._patience() == 2.5
    quiet._give_up(lambda each: each.until < 13.0)
    assert (quiet._unproven, first.is_closed, second.is_closed) == ([second], True, False)
    first.until = 9.0
    quiet._unproven[:] = [first]
    assert quiet._patience() == 0.0
    assert quiet._close_oldest()
    assert not quiet._close_oldest()


@pytest.mark.parametrize(
    ("number", "unproven", "goes_on", "closed"),
    [(errno.EMFILE, 1, True, True), (errno.EMFILE, 0, False, False), (errno.ECONNABORTED, 1, True, False)],
)
def test_a_connection_that_cannot_be_accepted_costs_the_oldest(
    quiet: Any, number: int, unproven: int, goes_on: bool, closed: bool
) -> None:
    def accept() -> Any:
        raise OSError(number, "no")

    quiet._listening.close()
    quiet._listening = SimpleNamespace(accept=accept, close=lambda: None)
    oldest = Proof()
    quiet._unproven[:] = [oldest] * unproven
    assert quiet._accept() is goes_on
    assert oldest.is_closed is closed


def test_a_connection_that_is_gone_at_once_is_closed(quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def challenge(*given: object) -> Any:
        raise OSError

    monkeypatch.setattr(listeners, "Challenge", challenge)
    accepted = Proof()
    quiet._listening.close()
    quiet._listening = SimpleNamespace(accept=lambda: (accepted, None), close=lambda: None)
    assert quiet._accept()
    assert (quiet._unproven, accepted.is_closed) == ([], True)
    quiet._unproven[:] = crowd = [Proof() for _ in range(MOST_UNPROVEN)]
    monkeypatch.setattr(listeners, "Challenge", lambda *given: accepted)
    assert quiet._accept()
    assert quiet._unproven == [*crowd[1:], accepted]
    assert [each.is_closed for each in crowd[:2]] == [True, False]
    quiet._unproven.pop(0)
    assert quiet._accept()
    assert len(quiet._unproven) == MOST_UNPROVEN
