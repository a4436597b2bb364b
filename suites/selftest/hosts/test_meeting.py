"""The meeting of hosts: who is taken in, who is refused, and who comes too late."""

from __future__ import annotations

import json
import platform
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import rendezvous
from lockstep.features.hosts.hosts_file import (
    HOSTS,
    HostInfo,
    read_hosts_file,
)
from lockstep.features.hosts.join_info import JoinInfo, Known
from lockstep.features.hosts.launchers import NodePlace
from lockstep.features.hosts.rendezvous import Comer, Membership, Rendezvous
from lockstep.features.hosts.wire import Credentials

FIRST = HostInfo("a", "10.0.0.1", versions={"torch": "2"})
SECOND = replace(FIRST, name="b", address="10.0.0.2", port=7)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Node 0 of three hosts."""
    monkeypatch.setattr(rendezvous, "_has_ended", lambda connection: connection.has_left)
    made = Rendezvous(
        NodePlace(0, 3), FIRST, JoinInfo("127.0.0.1", 0, b"s"), tmp_path / "hosts.json", {"A": "1"}
    )
    yield made
    made.end(0)


class Connected:
    """A connection to a host, on which nothing has come."""

    def __init__(self) -> None:
        self.is_closed = self.has_left = False
        self.sent: list[Any] = []

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(json.loads(data))

    def close(self) -> None:
        self.is_closed = True


def came(host: HostInfo = SECOND, nodes: object = 3) -> dict[str, Any]:
    return json.loads(json.dumps({"nodes": nodes, "host": asdict(host)}))


def test_hosts_come_and_get_names_of_their_own(meeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, str(meeting._path))
    one, two = Connected(), Connected()
    assert meeting._missing() == "node 1, 2 of 3"
    assert meeting._answer(1, came(), one) == {"name": "b", "first": "a"}
    assert (meeting._missing(), meeting._path.exists()) == ("node 2 of 3", False)
    assert meeting._answer(2, came(), two) == {"name": "b-2", "first": "a"}
    hosts = (FIRST, SECOND, replace(SECOND, name="b-2"))
    assert meeting.await_all(0.0, print) == hosts
    read = read_hosts_file()
    assert read is not None
    assert (read.hosts, read.environ) == (hosts, {"A": "1"})
    taken = "node 1 is b (10.0.0.2) already: c (10.0.0.3) needs another number"
    new = replace(SECOND, name="c", address="10.0.0.3")
    assert meeting._answer(1, came(new), Connected()) == {"refused": taken, "is_taken": True}
    one.has_left = True
    back = Connected()
    assert meeting._answer(1, came(new), back) == {"name": "c", "first": "a"}
    assert one.is_closed
    read = read_hosts_file()
    assert read is not None
    assert read.hosts == (FIRST, new, hosts[2])
    assert "refused" in meeting._answer(3, came(), Connected())
    assert meeting.await_all(0.0, print) == (FIRST, new, hosts[2])
    meeting._connections[2] = two
    for each in (back, two):
        assert not each.is_closed


def test_the_end_is_sent_to_all_hosts(tmp_path: Path) -> None:
    made: Any = Rendezvous(NodePlace(0, 2), FIRST, JoinInfo("127.0.0.1", 0, b"s"), tmp_path / "x", {})
    made._answer(1, came(nodes=2), there := Connected())
    made.end(5)
    assert (there.sent, there.is_closed, made._connections) == ([{"end": 5}], True, {})


@pytest.mark.parametrize(
    ("node", "nodes", "why"),
    [
        (0, 3, "b (10.0.0.2) came as node 0 of 3, and node 0 waits for 3 hosts"),
        (3, 3, "b (10.0.0.2) came as node 3 of 3, and node 0 waits for 3 hosts"),
        (1, 2, "b (10.0.0.2) came as node 1 of 2, and node 0 waits for 3 hosts"),
    ],
)
def test_a_host_of_another_run_is_refused(meeting: Any, node: int, nodes: int, why: str) -> None:
    assert meeting._answer(node, came(nodes=nodes), Connected()) == {"refused": why}
    with pytest.raises(LaunchError, match=f"^{re.escape(why)}$"):
        meeting.await_all(0.0, print)


def test_a_right_host_is_answered_after_another_was_refused(meeting: Any) -> None:
    assert "refused" in meeting._answer(1, came(nodes=2), Connected())
    assert meeting._answer(1, came(), Connected()) == {"name": "b", "first": "a"}
    with pytest.raises(LaunchError, match="came as node 1 of 2"):
        meeting.await_all(0.0, print)


def test_hosts_have_the_same_versions(meeting: Any) -> None:
    for versions, theirs in (({"torch": "3"}, "3"), ({}, "none")):
        answer = meeting._answer(1, came(replace(SECOND, versions=versions)), Connected())
        assert answer == {"refused": f"b has torch {theirs}, and node 0, a, has 2: install the same on both"}
    assert rendezvous._difference(FIRST, replace(SECOND, versions={"torch": "2", "x": "1"})) == ""


def test_a_host_has_ended_once_there_is_something_to_read() -> None:
    one, other = socket.socketpair()
    with one:
        assert not rendezvous._has_ended(one)  # type: ignore[arg-type]
        other.close()
        assert rendezvous._has_ended(one)  # type: ignore[arg-type]


def test_hosts_that_are_missing_are_named(meeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    where = f"node 0, a, waits at 127.0.0.1:{meeting.join_info.port}"
    why = f"node 1, 2 of 3 has not come within 0.02 s; {where}. Was it started there, and can it reach this?"
    with pytest.raises(LaunchError, match=f"^{re.escape(why)}$"):
        meeting.await_all(0.02, said.append)
    assert said == []
    monkeypatch.setattr(rendezvous, "SAY_AFTER", 0.01)
    with pytest.raises(LaunchError):
        meeting.await_all(0.02, said.append)
    assert said == [f"waiting for node 1, 2 of 3, up to 0.02 s; {where}"]
    meeting._place = NodePlace(0, rendezvous.NAMED + 3)
    first = ", ".join(str(node + 1) for node in range(rendezvous.NAMED))
    assert meeting._missing() == f"node {first}, and 2 more of {rendezvous.NAMED + 3}"


def test_a_host_that_comes_after_the_others_are_named_is_in_time(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def wait_for(is_decided: Callable[[], bool], seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            for node in (1, 2):
                meeting._answer(node, came(), Connected())
        return is_decided()

    monkeypatch.setattr(meeting._changed, "wait_for", wait_for)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=iter([10.0, 14.0, 15.0]).__next__))
    said: list[str] = []
    assert len(meeting.await_all(30.0, said.append)) == 3
    assert waited == [rendezvous.SAY_AFTER, 26.0]
    assert [text.partition(";")[0] for text in said] == ["waiting for node 1, 2 of 3, up to 30 s"]
    assert len(meeting.await_all(1.0, said.append)) == 3
    assert (waited[2:], len(said)) == ([1.0], 1)


def test_node_0_listens_where_it_can(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = f"^node 0 cannot wait for the others at 127.0.0.1:{port}: Address already in use"
        with pytest.raises(LaunchError, match=why):
            Rendezvous(NodePlace(0, 2), FIRST, JoinInfo("127.0.0.1", port, b"s"), tmp_path / "x", {})


def test_the_command_of_a_rerun_ends_before_the_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in (["-m", "lockstep", "hosts", "--", "-x"], ["-m", "lockstep", "hosts"]):
        monkeypatch.setattr(rendezvous.sys, "orig_argv", ["/bin/python", *typed])
        assert rendezvous._command() == ("python", "-m", "lockstep", "hosts", "--")


def test_a_host_learns_how_pytest_has_ended() -> None:
    one, other = [SimpleNamespace(recv_bytes=lambda: b'{"end": 3}') for _ in range(2)]
    assert Membership("b", "a", one).read_end() == 3  # type: ignore[arg-type]

    def gone() -> bytes:
        raise EOFError

    other.recv_bytes = gone
    assert Membership("b", "a", other).read_end() is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "by_hand", "tries", "why"),
    [
        (ConnectionRefusedError(111, "refused"), False, 3, "node 0 cannot be reached at h:5: refused"),
        (EOFError(), False, 3, "node 0 at h:5 has closed the connection"),
        (LaunchError("an earlier run"), False, 3, "an earlier run"),
        (LaunchError("the wrong one"), True, 1, "the wrong one"),
        (rendezvous._Refused("no place"), False, 1, "no place"),
    ],
)
def test_a_host_tries_to_come_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, error: Exception, by_hand: bool, tries: int, why: str
) -> None:
    now, tried, said = 0.0, 0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 6.0

    def introduce(self: Comer, info: JoinInfo) -> Membership:
        nonlocal tried
        tried += 1
        raise error

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(rendezvous, "SAY_AFTER", 5.0)
    monkeypatch.setattr(Comer, "_introduce", introduce)
    comer = Comer(NodePlace(1, 2), Known(JoinInfo("h", 5, b"s")), lambda *_: FIRST, said.append, by_hand)
    with pytest.raises(LaunchError, match=f"^{re.escape(why)}$"):
        comer.come(10.0)
    assert tried == tries
    assert said == ([f"{why}; trying for 10 s"] if tries > 1 else [])


def test_a_host_that_is_missed_later_is_waited_for_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said, tries = 0.0, [], 0

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds == rendezvous.TRY_EVERY
        now += rendezvous.GONE_AFTER / 2

    def introduce(self: Comer, info: JoinInfo) -> Membership:
        nonlocal tries
        tries += 1
        raise rendezvous._Taken("taken")

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(Comer, "_introduce", introduce)
    way = Known(JoinInfo("h", 5, b"s"))
    with pytest.raises(LaunchError, match=r"^taken$"):
        Comer(NodePlace(1, 2), way, lambda *_: FIRST, said.append, False).come(0.0)
    assert (tries, said) == (6, [])


def test_a_host_says_once_why_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 3.0

    def introduce(self: Comer, info: JoinInfo) -> Membership:
        if now > 20.0:
            return Membership("b", "a", None)  # type: ignore[arg-type]
        raise EOFError

    found: list[float] = []
    info = JoinInfo("h", 5, b"s")
    way: Any = SimpleNamespace(find=lambda until: found.append(until) or info)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(Comer, "_introduce", introduce)
    member = Comer(NodePlace(1, 2), way, lambda *_: FIRST, lambda text: said.append((now, text)), False)
    assert member.come(30.0).name == "b"
    assert said == [(6.0, "node 0 at h:5 has closed the connection; trying for 30 s")]
    assert {*found} == {30.0}


def comer_to(meeting: Any, node: int, host: HostInfo = SECOND, nodes: int = 2) -> Comer:
    """Return a host that comes by hand over a real connection."""

    def describe(address: str, credentials: Credentials) -> HostInfo:
        assert (address, credentials.secret, len(credentials.run)) == ("127.0.0.1", b"s", rendezvous.RUN)
        return host

    return Comer(NodePlace(node, nodes), Known(meeting.join_info), describe, print, True)


def test_hosts_meet_over_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, str(tmp_path / "hosts.json"))
    info = JoinInfo("127.0.0.1", 0, b"s")
    meeting = Rendezvous(NodePlace(0, 2), FIRST, info, tmp_path / "hosts.json", {})
    try:
        assert meeting.join_info.port > 0
        stranger = JoinInfo("127.0.0.1", meeting.join_info.port, b"s")
        with rendezvous.connect(
            rendezvous.Call(rendezvous.Purpose("rendezvous"), 1, 0, stranger.address, stranger.port),
            Credentials(b"s"),
        ) as stray:
            stray.send_bytes(b"[]")
            with pytest.raises((EOFError, OSError)):
                stray.recv_bytes()
        member = comer_to(meeting, 1).come(60.0)
        assert (member.name, member.first) == ("b", "a")
        assert meeting.await_all(60.0, print) == (FIRST, SECOND)
        with pytest.raises(rendezvous._Refused, match=r"^c has torch 3, and node 0, a, has 2"):
            comer_to(meeting, 1, replace(SECOND, name="c", versions={"torch": "3"}))._introduce(
                meeting.join_info
            )
        with pytest.raises(rendezvous._Taken, match=r"^node 1 is b \(10.0.0.2\) already: c"):
            comer_to(meeting, 1, replace(SECOND, name="c"))._introduce(meeting.join_info)
        assert meeting.await_all(0.0, print) == (FIRST, SECOND)
        read = read_hosts_file()
        assert read is not None
        assert (read.hosts, read.credentials.secret) == ((FIRST, SECOND), b"s")
    finally:
        meeting.end(4)
    assert member.read_end() == 4
    with pytest.raises(OSError, match="refused"):
        comer_to(meeting, 1)._introduce(meeting.join_info)


def test_a_silent_node_0_is_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = SimpleNamespace(run=b"r", send_bytes=lambda data: None, poll=lambda seconds: False)
    monkeypatch.setattr(rendezvous, "connect", lambda call, credentials: connection)
    monkeypatch.setattr(rendezvous, "asdict", lambda host: {})
    comer = Comer(NodePlace(1, 2), Known(JoinInfo("h", 5, b"s")), lambda *_: FIRST, print, True)
    with pytest.raises(LaunchError, match=r"^node 0 cannot be reached at h:5: no answer in time$"):
        comer.come(-1.0)


def test_versions_are_of_python_torch_and_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"torch": "2.9"}

    def version(name: str) -> str:
        if name not in numbers:
            raise PackageNotFoundError
        return numbers[name]

    monkeypatch.setattr(rendezvous, "version", version)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"x")
    found = rendezvous.versions()
    assert found["Python"] == platform.python_version()
    assert found["torch"] == "2.9"
    digest = re.fullmatch(r"unknown \(files ([0-9a-f]{12})\)", found["Lockstep"])
    assert digest is not None
    numbers["lockstep-harness"] = "1.0"
    assert rendezvous.versions()["Lockstep"] == f"1.0 (files {digest[1]})"
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"y")
    assert digest[1] not in rendezvous.versions()["Lockstep"]
