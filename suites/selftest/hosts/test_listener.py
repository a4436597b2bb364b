"""Connections without the secret: there are few, each ends soon, and none of them ends a listener."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

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
