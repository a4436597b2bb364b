"""Hosts and ranks elsewhere, as a controller sees them."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError, MessageRefused
from lockstep.features.hosts import remote
from lockstep.features.hosts.orders import Fetch, Fetched, Look, Signal
from lockstep.features.hosts.remote import Host, RemoteRank
from lockstep.features.hosts.wire import Call, Credentials, Purpose
from lockstep.place import Place
from suites.selftest.hosts.samples import CREDENTIALS, SECOND, SESSION, spec_of

# A host


class Control:
    """The connection to an agent: what is sent, and answers that are raised if they are errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.sent: list[Any] = []
        self.patience: list[float] = []
        self.is_closed = False

    def send(self, order: Any) -> None:
        if self.is_closed:
            raise OSError
        self.sent.append(order)

    def poll(self, within: float) -> bool:
        self.patience.append(within)
        return bool(self.answers)

    def recv(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.is_closed = True


def connected(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> tuple[Host, Control]:
    control = Control(*answers)
    monkeypatch.setattr(remote, "connect", lambda call, credentials: control)
    return Host(1, SECOND, CREDENTIALS), control


def test_a_connection_to_a_host_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(remote, "connect", lambda *given: calls.append(given))
    host = Host(1, SECOND, CREDENTIALS)
    host.attach(Purpose("end", "w", 3))
    assert calls == [
        (Call(Purpose("control"), 0, 1, "127.0.0.2", 7), CREDENTIALS),
        (Call(Purpose("end", "w", 3), 0, 1, "127.0.0.2", 7), CREDENTIALS),
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(111, "refused"), "127.0.0.2:7: refused"),
        (OSError("timed out"), "127.0.0.2:7: timed out"),
        (LaunchError("another secret"), "another secret"),
    ],
)
def test_a_host_that_cannot_be_reached_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def connect(call: Call, credentials: Credentials) -> None:
        raise error

    monkeypatch.setattr(remote, "connect", connect)
    with pytest.raises(LaunchError) as raised:
        Host(1, SECOND, CREDENTIALS)
    assert str(raised.value) == f"host b is gone ({why})"


def test_an_order_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    host, control = connected(monkeypatch, (True, "S"), (False, "no memory"), (True, None))
    assert host.ask(Look("w", 0)) == "S"
    with pytest.raises(LaunchError, match=r"^host b: no memory$"):
        host.ask(Look("w", 1), 3.0)
    assert host.ask(Look("w", 2)) is None
    assert control.sent == [Look("w", 0), Look("w", 1), Look("w", 2)]
    assert control.patience == [remote.ANSWER_WITHIN, 3.0, remote.ANSWER_WITHIN]
    assert (host.is_gone, control.is_closed) == (False, False)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ((), "host b is gone"),
        ((EOFError(),), "host b is gone"),
        ((OSError(),), "host b is gone"),
        ((MessageRefused("changed"),), "host b is given up: changed"),
        ((KeyboardInterrupt(),), ""),
    ],
)
def test_a_host_whose_answer_does_not_come_is_dropped(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[BaseException, ...], why: str
) -> None:
    host, control = connected(monkeypatch, *answers)
    with pytest.raises(LaunchError if why else KeyboardInterrupt, match=f"^{why}$"):
        host.ask(Look("w", 0))
    assert (host.is_gone, control.is_closed) == (True, True)
    with pytest.raises(LaunchError, match=r"^host b is gone$"):
        host.ask(Look("w", 0))
    assert control.sent == [Look("w", 0)]


def test_a_host_that_takes_no_order_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    host, control = connected(monkeypatch)
    control.is_closed = True
    with pytest.raises(LaunchError, match=r"^host b is gone$"):
        host.send(Look("w", 0))
    assert host.is_gone


# A rank elsewhere


class Elsewhere:
    """A host that does what a test says, and the rank's connection for its end."""

    def __init__(self, *answers: Any) -> None:
        self.info = SECOND
        self.answers = [*answers]
        self.asked: list[Any] = []
        self.is_gone = False

    def ask(self, order: Any) -> Any:
        self.asked.append(order)
        if not self.answers or isinstance(self.answers[0], BaseException):
            raise LaunchError("host b is gone")
        return self.answers.pop(0)

    def drop(self) -> None:
        self.is_gone = True


@pytest.fixture
def ends() -> Any:
    ours, theirs = multiprocessing.Pipe()
    yield SimpleNamespace(ours=ours, theirs=theirs)
    ours.close()
    theirs.close()


def rank_of(host: Any, directory: Path, end: Any, place: Place | None = None) -> RemoteRank:
    spec = replace(spec_of(str(directory), 1), place=place)
    spec = replace(spec, session=replace(SESSION, output_directory=str(directory / "out")))
    return RemoteRank(host, "w", spec, SimpleNamespace(close=lambda: None), end)  # type: ignore[arg-type]


def test_the_exit_code_of_a_rank_comes_from_its_host(tmp_path: Path, ends: Any) -> None:
    rank = rank_of(host := Elsewhere(), tmp_path, ends.ours)
    assert (rank.host, rank.moved, rank.pid, rank.sentinel) == ("b", (), 0, ends.ours.fileno())
    assert (rank.is_alive(), rank.exitcode, rank.is_lost) == (True, None, False)
    rank.join(0.0)
    ends.theirs.send(-9)
    rank.join(60.0)
    assert (rank.is_alive(), rank.exitcode, rank.exitcode, rank.is_alive()) == (False, -9, -9, False)
    assert (rank.is_lost, host.is_gone) == (False, False)


def test_a_rank_is_lost_with_its_host(tmp_path: Path, ends: Any) -> None:
    rank = rank_of(host := Elsewhere(), tmp_path, ends.ours)
    ends.theirs.close()
    assert (rank.exitcode, rank.is_lost, host.is_gone) == (None, True, True)
    assert (rank.exitcode, rank.is_alive()) == (None, False)


def test_a_rank_that_is_closed_counts_as_ended(
    tmp_path: Path, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(remote, "wait", lambda sources, seconds: waited.append(seconds))
    rank = rank_of(Elsewhere(), tmp_path, ends.ours)
    rank.close()
    assert (waited, ends.ours.closed, rank.is_alive()) == ([2.0], True, False)
    rank.join(1.0)
    assert waited == [2.0]


def test_a_rank_is_asked_for_and_signalled_by_its_host(tmp_path: Path, ends: Any) -> None:
    place = Place(1, ("a", "b"), 1, 0, 1, "x", "y", moved=(("/w", "/v"),))
    rank = rank_of(host := Elsewhere("S", None, None), tmp_path, ends.ours, place)
    assert rank.moved == (("/w", "/v"),)
    assert rank.state() == "S"
    rank.signal(15)
    rank.kill()
    assert host.asked == [Look("w", 1), Signal("w", 1, 15), Signal("w", 1, 0)]
    assert rank.state() == ""
    with pytest.raises(OSError, match=r"^host b is gone$"):
        rank.signal(15)
    rank.kill()


def test_the_files_of_a_rank_are_brought_up_to_date(tmp_path: Path, ends: Any) -> None:
    captured = tmp_path / "rank-1.captured"
    captured.mkdir()
    (captured / "old").touch()
    (tmp_path / "rank-1.log").write_bytes(b"one")
    (tmp_path / "rank-1.standing").write_bytes(b"old and long")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_bytes(b"kept ")
    files = (
        ("rank-1.log", 3, b" two"),
        ("rank-1.stacks", 0, b"stacks"),
        ("rank-1.standing", 0, b"new"),
        ("rank-1.captured/out", 0, b"c"),
        (f"rank-1.{remote.KEPT}/x", 0, b"more"),
        (f"rank-1.{remote.KEPT}/deep/er/y", 0, b"y"),
    )
    rank = rank_of(host := Elsewhere(Fetched(files), Fetched(())), tmp_path, ends.ours)
    rank.fetch()
    assert host.asked == [Fetch("w", 1, {"rank-1.log": 3})]
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert found == {
        "rank-1.log": b"one two",
        "rank-1.stacks": b"stacks",
        "rank-1.standing": b"new",
        "rank-1.captured/out": b"c",
        "out/x": b"kept more",
        "out/deep/er/y": b"y",
    }
    rank.fetch()
    assert host.asked[1] == Fetch("w", 1, {"rank-1.log": 7, "rank-1.stacks": 6})
    assert [*captured.iterdir()] == []
    (captured / "kept").touch()
    rank.fetch()  # the host is gone
    assert (captured / "kept").exists()
