"""The controller's handle on a rank that does not read, stops while it writes, or has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import MessageRefused
from lockstep.flight_entries import FlightRecord
from lockstep.launch.processes import ChildProcess, RankProcess
from lockstep.protocol import Probe, Progress, RankStatus, Ready
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.world import handle as module
from lockstep.world.handle import RankHandle
from lockstep.world.outcome import Died
from lockstep.world.world import World


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankHandle, Connection]]:
    """A handle on a rank that is no process, and the rank's end of the wire."""
    monkeypatch.setattr(module, "MESSAGE_WITHIN", 1)
    session = SessionSpec((), "/", (), (), {}, {}, captures=True)
    spec = RankSpec(0, WorldKey(1, "gloo", "cpu"), session, 0, str(tmp_path), str(tmp_path))
    ours, theirs = Pipe()
    facts = {"pid": 1, "sentinel": theirs.fileno(), "exitcode": None}  # not ready: it is alive
    process: Any = SimpleNamespace(**facts, join=lambda timeout: None)
    with ours, theirs:
        yield RankHandle(spec, RankProcess(process, ours, "")), theirs


def test_a_rank_that_does_not_read_does_not_block_the_controller(ends: tuple[RankHandle, Connection]) -> None:
    handle, theirs = ends
    for _ in range(5_000):  # a few hundred fill the wire
        handle.send(Probe(full=True))
    assert isinstance(theirs.recv(), Probe)


def test_a_rank_that_stops_inside_a_message_counts_as_dead(
    ends: tuple[RankHandle, Connection],
) -> None:
    handle, theirs = ends
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"the rest never comes")
    (died,) = handle.read(handle.sources()[0])
    assert isinstance(died, Died)
    assert died.how == "closed its connection to the controller"
    assert handle.sources() == ()


class Process:
    """A started rank that is no process: its state is what a test says."""

    def __init__(self, wire: Connection, sentinel: int) -> None:
        self.wire, self.sentinel, self.host, self.moved = wire, sentinel, "far", (("/here", "/there"),)
        self.exitcode: int | None = None
        self.is_lost = self.lives = False
        self.stat = "S"
        self.stacks: Path | None = None
        self.calls: list[tuple[Any, ...]] = []

    def state(self) -> str:
        return self.stat

    def fetch(self) -> None:
        self.calls.append(("fetch",))

    def close(self) -> None:
        self.calls.append(("close",))

    def join(self, seconds: float) -> None:
        self.calls.append(("join", seconds))

    def is_alive(self) -> bool:
        return self.lives

    def signal(self, number: int) -> None:
        self.calls.append(("signal", number))
        if self.stacks is not None:
            with self.stacks.open("a") as file:
                file.write(
                    'Current thread 0x1 (most recent call first):\n  File "/there/a.py", line 3 in f\n'
                )


Fake = tuple[RankHandle, Process, Connection, Connection]
"""A handle, its process, and the rank's ends of the wire and of the sentinel."""


@pytest.fixture
def fakes(ends: tuple[RankHandle, Connection]) -> Iterator[list[Fake]]:
    with contextlib.ExitStack() as stack:
        made = []
        for rank in (0, 1):
            spec = dataclasses.replace(ends[0].spec, rank=rank)
            wire, theirs, sentinel, end = (stack.enter_context(each) for each in (*Pipe(), *Pipe()))
            process: Any = Process(wire, sentinel.fileno())
            made.append((RankHandle(spec, process), process, theirs, end))
        yield made


@pytest.fixture
def fake(fakes: list[Fake]) -> Fake:
    """The second of them, of rank 1."""
    return fakes[1]


def test_a_handle_names_its_rank_and_host(fake: Fake) -> None:
    handle, process, _, _ = fake
    assert (handle.rank, str(handle), handle.host) == (1, "rank 1", "far")
    assert handle.is_alive()
    assert handle.lost_host() == ""
    process.is_lost = True
    assert handle.lost_host() == "far"
    process.exitcode = 0
    assert handle.lost_host() == ""


def test_a_process_has_ended_once_its_sentinel_is_ready(fake: Fake) -> None:
    handle, _, _, end = fake
    end.close()
    assert not handle.is_alive()


def test_messages_are_received_in_their_order_and_before_the_end(fake: Fake) -> None:
    handle, process, theirs, end = fake
    assert module.receive([handle], 0.0) == []
    theirs.send((Ready(), Progress("1")))
    assert module.receive([handle], 20.0) == [(1, Ready()), (1, Progress("1"))]
    theirs.send((Progress("2"),))
    theirs.send((Progress("3"),))
    process.exitcode = 3
    end.close()
    *words, (rank, died) = [(1, each) for each in handle.read(process.sentinel)]
    assert words == [(1, Progress("2")), (1, Progress("3"))]
    assert isinstance(died, Died)
    assert (rank, died.exitcode, died.host_gone, died.phases_over) == (1, 3, "", 0)
    assert handle.died is died
    assert handle.read(process.sentinel) == []
    assert handle.sources() == ()
    assert ("join", 15.0) not in process.calls


def test_an_end_of_the_wire_awaits_the_exit_status(fake: Fake, tmp_path: Path) -> None:
    handle, process, theirs, _ = fake
    Path(handle.spec.path_of("log")).write_text("last words\n")
    Path(handle.spec.path_of("standing")).write_bytes(struct.pack("QQ", 2, 5))
    theirs.close()
    (died,) = handle.read(process.wire)
    assert isinstance(died, Died)
    assert (died.output, died.phases_over) == ("words", 2)
    assert ("join", 15.0) in process.calls
    assert ("fetch",) in process.calls


def test_a_message_that_is_refused_is_the_first_of_the_last_words(fake: Fake) -> None:
    handle, _, _, _ = fake
    Path(handle.spec.path_of("log")).write_text("last words\n")

    def refuse() -> None:
        raise MessageRefused("not what it has sent")

    wire: Any = SimpleNamespace(recv=refuse)
    handle._wire = wire
    (died,) = handle.read(wire)
    assert isinstance(died, Died)
    assert died.output == "not what it has sent\nlast words"


def test_a_message_may_stop_in_the_middle_for_some_seconds(fake: Fake) -> None:
    _, process, _, _ = fake
    with socket.socket(fileno=os.dup(process.wire.fileno())) as end:
        assert struct.unpack("ll", end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) == (1, 0)


def test_messages_are_awaited_in_whole_milliseconds(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Poll:
        def register(self, number: int, events: int) -> None:
            asked.append(number)

        def poll(self, milliseconds: int) -> list[Any]:
            asked.append(milliseconds)
            return []

    handle, process, _, _ = fake
    monkeypatch.setattr(module, "select", SimpleNamespace(poll=Poll, POLLIN=1))
    for timeout in (2.0015, -1.0):
        assert module.receive([handle], timeout) == []
    sources = [process.wire.fileno(), process.sentinel]
    assert asked == [*sources, 2002, *sources, 0]


def test_of_a_lost_host_nothing_is_read(fake: Fake) -> None:
    handle, process, theirs, _ = fake
    Path(handle.spec.path_of("standing")).write_bytes(struct.pack("QQ", 2, 0))
    process.is_lost = True
    theirs.close()
    (died,) = handle.read(process.wire)
    assert isinstance(died, Died)
    assert (died.host_gone, died.phases_over) == ("far", 1)


def test_what_a_rank_has_printed_is_read_from_its_item_on(fake: Fake) -> None:
    handle, process, _, _ = fake
    Path(handle.spec.path_of("log")).write_text("of another item, of this at /there/a\n")
    Path(handle.spec.path_of("standing")).write_bytes(struct.pack("QQ", 1, len("of another item, ")))
    assert handle.log().strip() == "of this at /here/a"
    assert process.calls == [("fetch",)]
    assert handle.phases_over() == 1
    assert process.calls == [("fetch",)] * 2


@pytest.mark.parametrize(("stat", "stopped"), [("T", True), ("t", False), ("S", False)])
def test_a_stopped_process_is_described_as_such(fake: Fake, stat: str, stopped: bool) -> None:
    handle, process, _, _ = fake
    process.stat = stat
    assert handle.is_stopped() == stopped
    found = handle.describe_silent()
    if stat == "S":
        assert found == RankStatus("(not responding)", "a blocking system call", state="silent")
        assert not any(call[0] == "signal" for call in process.calls)
    else:
        place = "an unknown place: it is stopped"
        assert found == RankStatus("(its process is stopped)", place, state="stopped")


def test_a_silent_rank_is_asked_for_its_stacks(fake: Fake) -> None:
    handle, process, _, _ = fake
    process.stacks = Path(handle.spec.path_of("stacks"))
    process.stacks.write_text("of an earlier test\n")
    found = handle.describe_silent()
    assert found.state == "silent"
    assert found.where == "/here/a.py:3 in f, which holds the GIL"
    assert found.stacks.splitlines() == [
        "Current thread 0x1 (most recent call first):",
        '  File "/here/a.py", line 3 in f',
    ]
    assert process.calls[:3] == [("fetch",), ("signal", signal.SIGUSR1), ("fetch",)]


def test_a_rank_without_stacks_is_in_a_system_call(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, process, _, _ = fake
    Path(handle.spec.path_of("stacks")).write_text("of an earlier test\n")
    assert handle.describe_silent().where == "a blocking system call"
    assert ("signal", signal.SIGUSR1) in process.calls


def test_the_end_of_a_process_is_awaited_to_a_moment(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, process, _, _ = fake
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    assert handle.await_end(12.5)
    process.lives = True
    assert not handle.await_end(9.0)
    assert process.calls == [("join", 2.5), ("join", 0.0)]
    handle.close()
    assert process.calls[2:] == [("close",)]


@pytest.mark.parametrize(("code", "is_accident"), [(None, False), (0, False), (1, True), (-9, True)])
def test_an_accident_while_a_rank_closes_is_known_once(
    fake: Fake, code: int | None, is_accident: bool
) -> None:
    handle, process, theirs, _ = fake
    process.exitcode = code
    Path(handle.spec.path_of("log")).write_text("last words")
    assert handle.how_it_closed() == (Died(code, "last words", 0.0) if is_accident else None)
    theirs.close()
    handle.read(process.wire)
    assert handle.how_it_closed() is None


def test_whole_statuses_are_awaited_of_ranks_that_live(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_WITHIN", 20.0)
    (first, _, other, _), (second, _, theirs, _) = fakes
    record = FlightRecord((), {}, {}, 0, 0)
    early, whole = RankStatus("", "early"), RankStatus("", "whole", record=record)
    other.send((Progress(), early, whole))
    theirs.send((whole,))
    seen: list[tuple[int, Any]] = []
    answers = module.request_statuses([first, second], lambda rank, message: seen.append((rank, message)))
    assert answers == {0: whole, 1: whole}
    assert sorted(seen, key=lambda each: each[0]) == [
        *((0, Progress()), (0, early), (0, whole)),
        (1, whole),
    ]
    assert other.recv() == theirs.recv() == Probe(full=True)
    theirs.send((whole,))
    first.died = Died(1, "", 0.0)
    assert module.request_statuses([first, second]) == {1: whole}


def test_ranks_that_do_not_answer_in_time_are_described(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_WITHIN", 0.2)
    early = RankStatus("", "early")
    fakes[0][2].send((early,))
    answers = module.request_statuses([handle for handle, *_ in fakes])
    assert answers == {0: early, 1: RankStatus("(not responding)", "a blocking system call", state="silent")}


def test_a_world_whose_directory_is_gone_says_so(ends: tuple[RankHandle, Connection], tmp_path: Path) -> None:
    handle, _ = ends
    launcher: Any = SimpleNamespace(directory=str(tmp_path))
    world = World(WorldKey(1, "gloo", "cpu"), "world-3", handle.spec.session, launcher, None)
    world._handles = [handle]
    assert f"the directory of 1 rank (gloo, cpu), {tmp_path}/world-3, has been removed" in world.fault()


def test_a_world_is_gone_when_no_rank_is_left(ends: tuple[RankHandle, Connection], tmp_path: Path) -> None:
    launcher: Any = SimpleNamespace(directory=str(tmp_path))
    world = World(WorldKey(2, "gloo", "cpu"), "world-3", ends[0].spec.session, launcher, None)
    left: Any = SimpleNamespace(is_alive=lambda: False)
    world._handles = [left, ends[0]]
    assert not world.is_gone()
    world._handles = [left, left]
    assert world.is_gone()


def test_a_killed_world_leaves_its_launcher(ends: tuple[RankHandle, Connection], tmp_path: Path) -> None:
    calls: list[Any] = []
    launcher: Any = SimpleNamespace(directory=str(tmp_path), forget=calls.append, end_world=calls.append)
    world = World(WorldKey(1, "gloo", "cpu"), "world-3", ends[0].spec.session, launcher, None)
    started = SimpleNamespace(kill=lambda: calls.append("killed"))
    left: Any = SimpleNamespace(started=started, close=lambda: calls.append("closed"))
    world._handles = [left]
    world.kill()
    assert calls == ["killed", "closed", started, f"{tmp_path}/world-3"]


def test_a_process_that_has_just_ended_can_be_killed() -> None:
    process = subprocess.Popen(["sleep", "60"])
    stand_in: Any = SimpleNamespace(pid=process.pid, sentinel=-1)
    served = ChildProcess(stand_in, lambda: True)
    process.kill()
    process.wait()
    served.kill()
    assert not served.is_alive()


def test_a_process_that_runs_is_killed() -> None:
    process = subprocess.Popen(["sleep", "60"])
    stand_in: Any = SimpleNamespace(pid=process.pid, sentinel=-1)
    ChildProcess(stand_in, lambda: True).kill()
    assert process.wait(timeout=10) == -signal.SIGKILL
