"""Connections between hosts: a proof is worth nothing elsewhere, and no message can be changed on its way."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.exceptions import LaunchError, MessageRefused
from lockstep.features.hosts.agent import Agent, _Service, _World
from lockstep.features.hosts.hosts_file import HostInfo
from lockstep.features.hosts.join_info import JoinInfo, Known
from lockstep.features.hosts.launchers import NodePlace
from lockstep.features.hosts.listener import Listener
from lockstep.features.hosts.orders import EndWorld
from lockstep.features.hosts.remote import Host
from lockstep.features.hosts.rendezvous import Comer, Rendezvous
from lockstep.features.hosts.wire import RUN, Call, Credentials, Purpose, SignedConnection, connect, listen
from lockstep.launch.processes import ProcessLauncher, RankProgram
from suites.selftest.hosts.bed import Bed
from suites.selftest.project import wait_for

HERE = "127.0.0.1"
RIGHT = Credentials(b"the secret of the run", b"r" * RUN)


class Ends:
    """A listener of node 1, and what it has admitted."""

    def __init__(self) -> None:
        self.listener = Listener(listen(HERE), 1, RIGHT, ("control", "wire"), self._admit)
        self.stop, self._stopped = socket.socketpair()
        self._admitted: list[tuple[SignedConnection, Call]] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.listener.serve, args=(self._stopped,))
        self._thread.start()
        self.call = Call(Purpose("wire", "world", 3), 0, 1, HERE, self.listener.port)

    def _admit(self, connection: SignedConnection, call: Call) -> None:
        with self._changed:
            self._admitted.append((connection, call))
            self._changed.notify_all()

    def admitted(self) -> tuple[SignedConnection, Call]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._admitted, 60)
            return self._admitted.pop()

    def close(self) -> None:
        self.stop.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._stopped.close()
        self.listener.close()
        assert self._admitted == []


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


# The proof


def test_both_ends_have_the_connection_and_its_purpose(ends: Ends) -> None:
    with connect(ends.call, RIGHT) as ours:
        theirs, call = ends.admitted()
        with theirs:
            assert call == ends.call
            ours.send({"a": [1]})
            theirs.send_bytes(b"-" * 100_000)
            assert theirs.recv() == {"a": [1]}
            assert ours.recv_bytes() == b"-" * 100_000


def test_a_listener_whose_run_is_not_known_names_it(ends: Ends) -> None:
    with connect(ends.call, replace(RIGHT, run=b"")) as ours, ends.admitted()[0]:
        assert ours.run == RIGHT.run


@pytest.mark.parametrize(
    ("credentials", "change"),
    [
        (replace(RIGHT, secret=b"another secret"), {}),
        (replace(RIGHT, run=b"x" * RUN), {}),
        (RIGHT, {"purpose": Purpose("rendezvous")}),
        (RIGHT, {"callee": 2}),
    ],
    ids=["secret", "run", "purpose", "node"],
)
def test_another_call_gets_no_answer(ends: Ends, credentials: Credentials, change: dict[str, object]) -> None:
    with pytest.raises(LaunchError, match="has another secret, or is no host of Lockstep that listens"):
        connect(replace(ends.call, **change), credentials)  # type: ignore[arg-type]


def test_what_comes_before_a_proof_is_neither_unpickled_nor_answered(ends: Ends) -> None:
    with socket.create_connection((HERE, ends.listener.port)) as peer:
        peer.sendall(pickle.dumps(_Bomb()) * 20)
        peer.settimeout(60)
        assert len(_received(peer)) == RUN + 32  # the challenge, and nothing more


def _received(peer: socket.socket) -> bytes:
    received = b""
    try:
        while more := peer.recv(1000):
            received += more
    except ConnectionError:
        pass
    return received


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('unpickled')",)


# Someone in between


class Between:
    """A stranger who listens, and passes on what comes to a port of another listener, and back.

    Args:
        change: gets each message of the client with its number, and returns what is passed on.

    Attributes:
        seen: What the client has sent.
        to_client: The socket that leads to it.
    """

    def __init__(self, port: int, change: Callable[[int, bytes], bytes] = lambda number, data: data) -> None:
        self._listening = socket.create_server((HERE, 0))
        self.port: int = self._listening.getsockname()[1]
        self.seen: list[bytes] = []
        self._target = port
        self._change = change
        self._sockets: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except OSError:
            return
        server = socket.socket()
        server.connect((HERE, self._target))
        self.to_client = client
        self._sockets += [client, server]
        self._begin(self._pass_on, server, client, [], lambda number, data: data)
        self._pass_on(client, server, self.seen, self._change)

    def _pass_on(
        self,
        source: socket.socket,
        target: socket.socket,
        seen: list[bytes],
        change: Callable[[int, bytes], bytes],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(change(len(seen), data))
                seen.append(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for each in self._sockets:
            each.close()


@pytest.fixture
def between() -> Iterator[Callable[..., Between]]:
    made: list[Between] = []

    def make(*args: object) -> Between:
        made.append(Between(*args))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


JOIN_INFO = JoinInfo(HERE, 0, RIGHT.secret)


def test_the_proof_of_a_controller_cannot_be_taken_to_the_meeting(
    tmp_path: Path, between: Callable[..., Between]
) -> None:
    """An agent has ended, and a stranger has its port: the rendezvous must not answer for it."""
    rendezvous = Rendezvous(NodePlace(0, 2), HostInfo("a", HERE), JOIN_INFO, tmp_path / "hosts.json", {})
    stranger = between(rendezvous.join_info.port)
    credentials = Credentials(RIGHT.secret, rendezvous._credentials.run)
    with pytest.raises(LaunchError, match="host b is gone"):
        Host(1, HostInfo("b", HERE, stranger.port), credentials)
    rendezvous.end(0)


def test_the_proof_of_a_host_cannot_be_taken_to_an_agent(between: Callable[..., Between]) -> None:
    """A stranger has the port of `--meet`: the agent of a host must not answer for node 0."""
    agent = Agent(HERE, 2, RIGHT)
    stop, stopped = socket.socketpair()
    serving = threading.Thread(target=agent.serve, args=(stopped.fileno(),))
    serving.start()
    way = Known(replace(JOIN_INFO, port=between(agent.port).port))
    comer = Comer(NodePlace(1, 3), way, lambda *_: HostInfo("b", HERE), print, is_by_hand=True)
    with pytest.raises(LaunchError, match="has another secret"):
        comer.come(0)
    stop.close()
    serving.join(60)
    stopped.close()
    agent.close()


def test_an_agent_forgets_the_ranks_that_are_gone() -> None:
    agent = Agent(HERE, 2, RIGHT)
    agent._launcher = launcher = ProcessLauncher("spawn", RankProgram("module:rank"))
    rank = Path(launcher.directory, "ranks", "7")
    rank.touch()
    agent.forget(Mock(pid=7))
    assert not rank.exists()
    agent._launcher = None
    agent.close()


def test_an_agent_takes_no_proof_that_was_meant_for_another_port(
    ends: Ends, between: Callable[..., Between]
) -> None:
    with pytest.raises(LaunchError, match="has another secret"):
        connect(replace(ends.call, port=between(ends.listener.port).port), RIGHT)


def on_the_way(monkeypatch: pytest.MonkeyPatch, stranger: Between) -> None:
    """Let connections pass by a stranger, though they are meant for the listener."""
    create = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda _, timeout: create((HERE, stranger.port), timeout)
    )


def changed(number: int, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if number == 2 else data


def sent_twice(number: int, data: bytes) -> bytes:
    return data * 2 if number == 1 else data


def left_out(number: int, data: bytes) -> bytes:
    return b"" if number == 1 else data


def cut_short(number: int, data: bytes) -> bytes:
    return struct.pack("!i", len(data) - 5) + data[4:-1] if number == 2 else data


@pytest.mark.parametrize("change", [changed, sent_twice, left_out, cut_short])
def test_a_message_that_was_tampered_with_is_refused(
    ends: Ends,
    between: Callable[..., Between],
    change: Callable[[int, bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stranger = between(ends.listener.port, change)
    on_the_way(monkeypatch, stranger)
    with connect(ends.call, RIGHT) as ours:
        theirs, _ = ends.admitted()
        with theirs:
            ours.send("first")
            wait_for(lambda: len(stranger.seen) == 2, "it has passed by", 60)
            if change is not left_out:
                assert theirs.recv() == "first"
            ours.send(_Bomb() if change in (changed, cut_short) else "second")
            with pytest.raises(MessageRefused, match="a message between hosts was changed"):
                theirs.recv()
            with pytest.raises((EOFError, OSError)):  # both ends have ended
                theirs.recv()
            with pytest.raises((EOFError, OSError)):
                ours.recv()


def test_a_message_that_is_sent_back_is_refused(
    ends: Ends, between: Callable[..., Between], monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = between(ends.listener.port)
    on_the_way(monkeypatch, stranger)
    with connect(ends.call, RIGHT) as ours, ends.admitted()[0] as theirs:
        ours.send("first")
        assert theirs.recv() == "first"
        wait_for(lambda: len(stranger.seen) == 2, "it has passed by", 60)
        stranger.to_client.sendall(stranger.seen[1])
        with pytest.raises(MessageRefused):
            ours.recv()


# A connection that is handed on


def _answer(connection: SignedConnection) -> None:
    while wait([connection], 60):
        connection.send(("seen", connection.recv()))


def test_a_connection_goes_on_in_the_process_that_gets_it(ends: Ends) -> None:
    with connect(ends.call, RIGHT) as ours:
        theirs, _ = ends.admitted()
        theirs.send("before")
        ours.send("before")
        assert (ours.recv(), theirs.recv()) == ("before", "before")
        process = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs,))
        process.start()
        theirs.close()
        for number in range(3):
            ours.send(number)
            assert ours.recv() == ("seen", number)
    process.join(60)


def test_the_report_says_that_a_message_was_changed(bed: Bed) -> None:
    bed.copy("hosts_tampered")
    ended = bed.run("-q")
    assert ended.count() == "2 failed, 1 passed", ended.output
    for name in ("test_from_a_rank", "test_to_a_rank"):
        report = ended.output.partition(f"_ {name} ")[2].partition("re-run")[0]
        assert "rank 1 of 2 (host b) died: SIGKILL" in report
        assert "a message between hosts was changed, or came twice or out of order" in report


def test_the_ranks_and_ports_of_a_world_end_with_it() -> None:
    """Not with the run: other worlds follow it."""
    done: list[object] = []
    ports = socket.socket(), socket.socket()
    world = _World("/base/world-0", ports)
    rank: Any = SimpleNamespace(kill=lambda: done.append("kill"), close=lambda: done.append("close"))
    world.ranks[0] = rank
    agent: Any = SimpleNamespace(
        forget=lambda started: done.append(started is rank),
        launcher=lambda: SimpleNamespace(end_world=done.append),
    )
    control: Any = SimpleNamespace(send=done.append)
    service = _Service(agent, control)
    service._worlds["world-0"] = world
    service._obey(EndWorld("world-0"))
    assert done == ["kill", "close", True, "/base/world-0", (True, None)]
    assert [port.fileno() for port in ports] == [-1, -1]
    assert service._worlds == {}
