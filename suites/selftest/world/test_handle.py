"""The controller's handle on a rank that does not read, stops while it writes, or has ended."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch.processes import ChildProcess, RankProcess
from lockstep.protocol import Probe
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
        yield RankHandle(spec, RankProcess(process, ours)), theirs


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
