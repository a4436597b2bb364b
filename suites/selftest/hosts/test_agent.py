"""The agent of a host without a controller: what it does for each order, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import agent as agents
from lockstep.features.hosts.agent import Agent, _as_here, _report_end, _Service, _World
from lockstep.features.hosts.code import digests
from lockstep.features.hosts.hosts_file import HOSTS
from lockstep.features.hosts.orders import (
    KEPT,
    Digest,
    Fetch,
    Look,
    PrepareWorld,
    Prestart,
    Signal,
    StartRanks,
)
from lockstep.features.hosts.wire import RUN, Call, Credentials, Purpose
from lockstep.launch.processes import RankProgram
from lockstep.place import Place
from lockstep.specification import RankSpec, SessionSpec, WorldKey

HERE = "127.0.0.1"
PRESTART = Prestart("spawn", RankProgram("x:y"))
SESSION = SessionSpec(
    ("/w/test_x.py", "-x"),
    "/w",
    ("pytest",),
    ("/w/lib", "/lib"),
    {},
    {},
    True,
    "/w/out",
    "/w",
    "/w/pytest.ini",
)
PLACE = Place(1, ("a", "b"), 1, 0, 1, HERE, HERE, moved=(("/w", "/v"),))


class Launcher:
    """The launcher of an agent."""

    def __init__(self, *made_for: Any) -> None:
        self.made_for = made_for
        self.said: list[Any] = []
        self.directory = "/d"

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.said.append((name, *given))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(agents, "ProcessLauncher", Launcher)
    monkeypatch.setenv("A", "1")
    monkeypatch.setenv("B", "1")
    made = Agent(HERE, 1, Credentials(b"s", b"r" * RUN))
    yield made
    made.close()


@pytest.fixture
def service(agent: Any, tmp_path: Path) -> Any:
    agent.prestart(PRESTART)
    agent.launcher().directory = str(tmp_path)
    control: Any = SimpleNamespace(answers=[])
    control.send = control.answers.append
    return _Service(agent, control)


def answer(service: Any, order: Any) -> Any:
    service._obey(order)
    return service._control.answers[-1]


def spec_of(rank: int, directory: str = "/there", place: Place | None = PLACE, **session: Any) -> RankSpec:
    return RankSpec(
        rank, WorldKey(2, "gloo", "cpu"), replace(SESSION, **session), 0, directory, "/base", place=place
    )


# The agent


def test_an_agent_has_one_launcher_for_all_controllers(agent: Any) -> None:
    stopped: list[int] = []
    agent.prestart(PRESTART)
    launcher = agent.launcher()
    agent.prestart(Prestart("forkserver", RankProgram("other:y")))
    assert agent.launcher() is launcher
    assert launcher.made_for == ("spawn", RankProgram("x:y"))
    assert agent.start([1], {0: 2}, 3.0) is None
    agent.forget("rank")
    agent._listener.serve = stopped.append
    agent.serve(7)
    assert stopped == [7]
    agent.close()
    assert launcher.said == [
        ("prestart",),
        ("prestart",),
        ("start", [1], 3.0, {0: 2}),
        ("forget", "rank"),
        ("stop",),
    ]
    assert agent._listener._listening.fileno() == -1
    assert agent.environ["A"] == "1"


def test_connections_of_a_rank_wait_for_its_start(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patient: list[object] = []
    monkeypatch.setattr(agents, "be_patient", patient.append)
    wire, end = Purpose("wire", "w", 1), Purpose("end", "w", 1)
    for purpose in (wire, end):
        agent._admit(f"of {purpose.kind}", Call(purpose, 0, 1, HERE, agent.port))
    assert patient == ["of wire"]
    assert agent.attached(end) == "of end"
    assert agent.attached(wire) == "of wire"
    monkeypatch.setattr(agents, "ATTACH_WITHIN", 0.0)
    with pytest.raises(LaunchError, match=r"^rank 1: its connection did not come$"):
        agent.attached(wire)


def test_a_connection_that_comes_late_is_waited_for(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ATTACH_WITHIN", 60.0)
    end = Purpose("end", "w", 1)
    coming = threading.Timer(0.02, agent._admit, ("it", Call(end, 0, 1, HERE, agent.port)))
    coming.start()
    assert agent.attached(end) == "it"
    coming.join()


def test_each_controller_is_served_in_a_thread(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    done = threading.Event()

    def run(self: _Service) -> None:
        served.append((self._agent, self._control, threading.current_thread().daemon))
        done.set()
        raise EOFError

    monkeypatch.setattr(_Service, "run", run)
    agent._admit("control", Call(Purpose("control"), 0, 1, HERE, agent.port))
    assert done.wait(60)
    assert served == [(agent, "control", True)]
    assert agent._attached == {}


# The orders of a controller


def test_an_order_is_answered_but_not_that_of_a_server(service: Any) -> None:
    service._obey(PRESTART)
    assert service._control.answers == []
    assert service._agent.launcher().said == [("prestart",)] * 2
    done, why = answer(service, Look("w", 0))
    assert (done, why) == (False, "KeyError: 'w'")


def test_a_world_is_prepared_with_ports_and_a_directory(service: Any, tmp_path: Path) -> None:
    done, prepared = answer(service, PrepareWorld("w"))
    world = service._worlds["w"]
    assert done
    assert (prepared.port, prepared.store_port) == tuple(port.getsockname()[1] for port in world.ports)
    assert world.directory == f"{tmp_path}/w"
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700
    assert service._agent.launcher().said[-1] == ("restore_directory",)
    service._end_world("w")


def test_ranks_start_as_if_they_were_here(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service._agent.environ = {"A": "1", "B": "1", HOSTS: "x"}
    answer(service, PrepareWorld("w"))
    attached: list[Purpose] = []
    started: list[Any] = []
    monkeypatch.setattr(service._agent, "attached", lambda purpose: attached.append(purpose) or purpose)

    def start(specs: list[RankSpec], wires: dict[int, Any], deadline: float) -> list[Any]:
        started.extend((specs, wires, deadline))
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]

    monkeypatch.setattr(service._agent, "start", start)
    order = StartRanks("w", (spec_of(1), spec_of(2, output_directory="")), {"A": "2"}, ("B", "C"), 100.0)
    assert answer(service, order) == (True, [7, 8])
    assert attached == [Purpose(kind, "w", rank) for rank in (1, 2) for kind in ("wire", "end")]
    (one, other), wires, deadline = started
    assert wires == {rank: Purpose("wire", "w", rank) for rank in (1, 2)}
    assert 50 < deadline - agents.time.monotonic() <= 100
    world = service._worlds["w"]
    assert {rank: each.pid for rank, each in world.ranks.items()} == {1: 7, 2: 8}
    assert world.ends == {rank: Purpose("end", "w", rank) for rank in (1, 2)}
    assert one == _as_here(spec_of(1), world.directory, {"A": "2"})
    session = one.session
    assert session.args == ("/v/test_x.py", "-x")
    assert (session.cwd, session.rootdir, session.inifile) == ("/v", "/v", "/v/pytest.ini")
    assert (session.sys_path, session.environ) == (("/v/lib", "/lib"), {"A": "2"})
    assert session.output_directory == f"{tmp_path}/w/rank-1.{KEPT}"
    assert (one.directory, one.basetemp) == (f"{tmp_path}/w", f"{tmp_path}/w/tmp-1")
    assert other.session.output_directory == ""
    world.ranks, world.ends = {}, {}
    service._end_world("w")


def test_connections_end_where_ranks_do_not_start(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(service, PrepareWorld("w"))
    closed: list[str] = []

    def attached(purpose: Purpose) -> Any:
        return SimpleNamespace(close=lambda: closed.append(purpose.kind))

    monkeypatch.setattr(service._agent, "attached", attached)

    def start(*given: object) -> list[Any]:
        raise LaunchError("no server")

    monkeypatch.setattr(service._agent, "start", start)
    done, why = answer(service, StartRanks("w", (spec_of(1),), {}, (), 1.0))
    assert (done, why, closed) == (False, "LaunchError: no server", ["wire"])
    assert service._worlds["w"].ranks == {}
    service._end_world("w")
    assert closed == ["wire", "end"]
    assert service._agent.launcher().said[-1] == ("end_world", f"{service._agent.launcher().directory}/w")
    before = [*service._agent.launcher().said]
    service._end_world("w")
    assert service._agent.launcher().said == before


def test_ranks_are_looked_at_and_signalled(service: Any) -> None:
    said: list[object] = []
    world = service._worlds["w"] = _World("/x", ())  # type: ignore[arg-type]
    world.ranks[3] = SimpleNamespace(  # type: ignore[assignment]
        state=lambda: "S", signal=said.append, kill=lambda: said.append("kill")
    )
    assert answer(service, Look("w", 3)) == (True, "S")
    assert answer(service, Signal("w", 3, 15)) == (True, None)
    assert answer(service, Signal("w", 3, 0)) == (True, None)
    assert said == [15, "kill"]


def test_the_files_of_a_rank_are_sent_from_where_they_are_known(service: Any, tmp_path: Path) -> None:
    service._worlds["w"] = _World(str(tmp_path), ())  # type: ignore[arg-type]
    files = {
        "rank-1.log": b"one two",
        "rank-1.captured/a": b"c",
        f"rank-1.{KEPT}/sub/b": b"kept",
        "rank-10.log": b"other",
        "rank-0.log": b"other",
        "rank-1x": b"other",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    done, fetched = answer(service, Fetch("w", 1, {"rank-1.log": 3}))
    assert done
    assert fetched.files == (
        ("rank-1.captured/a", 0, b"c"),
        (f"rank-1.{KEPT}/sub/b", 0, b"kept"),
        ("rank-1.log", 3, b" two"),
    )
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == files.keys() - {f"rank-1.{KEPT}/sub/b"}


def test_digests_are_of_the_files_that_stand_for_those_of_the_controller(
    service: Any, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("x")
    paths = ("/w/x", "/w/y", "/other")
    expected = {"/w/x": digests([f"{tmp_path}/x"])[f"{tmp_path}/x"], "/w/y": None, "/other": None}
    assert answer(service, Digest(paths, (("/w", str(tmp_path)),))) == (True, expected)


def test_a_controller_learns_how_ranks_end_until_it_is_gone(service: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    end, of_rank = multiprocessing.Pipe()
    reading, writing = os.pipe()
    service._control = ours
    waited: list[float] = []
    world = service._worlds["w"] = _World("/x", ())  # type: ignore[arg-type]
    started: Any = SimpleNamespace(
        sentinel=reading, exitcode=-9, join=waited.append, kill=lambda: None, close=lambda: None
    )
    world.ranks[1], world.ends[1] = started, end  # type: ignore[assignment]
    running = threading.Thread(target=pytest.raises, args=(EOFError, service.run), daemon=True)
    running.start()
    os.close(writing)
    assert of_rank.poll(60)
    assert of_rank.recv() == -9
    theirs.send(Look("unknown", 0))
    assert theirs.poll(60)
    assert theirs.recv() == (False, "KeyError: 'unknown'")
    theirs.close()
    running.join(60)
    assert waited == [1.0]
    assert (world.ends, service._worlds) == ({}, {})
    assert (ours.closed, end.closed) == (True, True)
    os.close(reading)
    of_rank.close()


def test_the_end_of_a_rank_may_come_after_that_of_its_controller() -> None:
    end, of_rank = multiprocessing.Pipe()
    of_rank.close()
    world = _World("/x", ())  # type: ignore[arg-type]
    world.ranks[1] = SimpleNamespace(join=lambda seconds: None, exitcode=0)  # type: ignore[assignment]
    world.ends[1] = end  # type: ignore[assignment]
    _report_end(world, 1)
    assert (end.closed, world.ends) == (True, {})
