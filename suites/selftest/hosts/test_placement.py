"""The placement of ranks on hosts, and the proof of a secret."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.hosts.placement import spread_of
from lockstep.hosts.roster import HostInfo, Roster, write_roster
from lockstep.hosts.wire import connect, listen, prove
from lockstep.place import Place
from lockstep.specification import HOSTS

FIRST = HostInfo("a", "127.0.0.1", cpus=4, gpus=("0", "1"))
ROSTER = Roster(b"secret", (FIRST, replace(FIRST, name="b")), {})


def spread(size: int, on: int | None = None, *, gpus: bool = False, per_host: int | None = None) -> Any:
    return spread_of(size, on, needs_gpus=gpus, per_host=per_host)


@pytest.fixture
def _two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_roster(tmp_path / "roster.json", ROSTER)
    assert (tmp_path / "roster.json").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(HOSTS, str(tmp_path / "roster.json"))


@pytest.mark.usefixtures("_two_hosts")
@pytest.mark.parametrize(
    ("size", "on", "gpus", "per_host", "placed"),
    [
        (2, None, False, None, ()),
        (3, None, False, None, ((0, 2), (1, 1))),
        (3, None, False, 3, ()),
        (5, None, False, None, ((0, 3), (1, 2))),  # more than fit: they share the CPUs evenly
        (3, 2, False, None, ((0, 2), (1, 1))),
        (4, 2, True, None, ((0, 2), (1, 2))),
        (1, 1, False, None, ()),
        (5, None, True, None, "5 ranks need a GPU each, the hosts of this run have 2, 2"),
        (3, 3, False, None, "the test needs 3 hosts, this run has 2"),
    ],
)
def test_ranks_fill_hosts_or_are_spread_evenly(
    size: int, on: int | None, gpus: bool, per_host: int | None, placed: object
) -> None:
    assert spread(size, on, gpus=gpus, per_host=per_host) == placed


def test_a_run_on_one_host_has_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOSTS, raising=False)
    assert spread(2, 2) == "the test needs 2 hosts, this run has 1"
    assert spread(2) == ()


def test_the_first_host_on_which_all_fit_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (replace(FIRST, gpus=()), replace(FIRST, cpus=8, gpus=()))
    write_roster(tmp_path / "roster.json", replace(ROSTER, hosts=hosts))
    monkeypatch.setenv(HOSTS, str(tmp_path / "roster.json"))
    assert spread(6) == ((1, 6),)


def test_directories_of_the_first_host_stand_for_those_of_another() -> None:
    place = Place(1, ("a", "b"), 1, 0, 1, "", "", moved=(("/home/me/work", "/w"),))
    assert place.path("/home/me/work/test_x.py") == "/w/test_x.py"
    assert place.path("/home/me/work") == "/w"
    assert place.path("/home/me/workshop/test_x.py") == "/home/me/workshop/test_x.py"


def admitted(listener: socket.socket, found: list[Connection | None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(prove(listener.accept()[0], b"right")))
    thread.start()
    return thread


def test_a_peer_with_the_secret_is_admitted() -> None:
    found: list[Connection | None] = []
    with listen("127.0.0.1") as listener:
        thread = admitted(listener, found)
        with connect("127.0.0.1", listener.getsockname()[1], b"right") as ours:
            thread.join(60)
            assert found[0] is not None
            with found[0] as theirs:
                theirs.send("hello")
                assert ours.recv() == "hello"


def test_a_peer_without_the_secret_gets_no_answer() -> None:
    found: list[Connection | None] = []
    with listen("127.0.0.1") as listener:
        thread = admitted(listener, found)
        with pytest.raises(LaunchError, match="has another secret"):
            connect("127.0.0.1", listener.getsockname()[1], b"wrong")
        thread.join(60)
    assert found == [None]


def test_what_a_peer_sends_before_its_proof_is_never_unpickled() -> None:
    found: list[Connection | None] = []
    with listen("127.0.0.1") as listener:
        thread = admitted(listener, found)
        with socket.create_connection(listener.getsockname()) as peer:
            import pickle

            message = pickle.dumps(_Bomb())
            peer.sendall(len(message).to_bytes(4, "big") + message)
            thread.join(60)
            peer.settimeout(60)
            received = b"".join(iter(lambda: _receive(peer), b""))
    assert found == [None]
    assert len(received) == 4 + 32  # its challenge, and nothing more


def _receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1000)
    except ConnectionError:
        return b""


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('unpickled')",)
