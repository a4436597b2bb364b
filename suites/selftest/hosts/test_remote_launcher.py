"""The launcher that spreads the ranks of a world over hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import remote
from lockstep.features.hosts.code import CodeComparison
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo, HostsFile
from lockstep.features.hosts.orders import (
    Digest,
    EndWorld,
    Prepared,
    PrepareWorld,
    Prestart,
    Signal,
    StartRanks,
)
from lockstep.features.hosts.remote import HostsLauncher
from lockstep.features.hosts.wire import Credentials, Purpose
from lockstep.launch.processes import RankProcess, RankProgram
from lockstep.place import Place
from lockstep.specification import RankSpec, WorldKey
from suites.selftest.hosts.samples import CREDENTIALS, FIRST, SECOND, SPREAD, spec_of


class Local:
    """The launcher of this machine."""

    directory = "/tmp/d"

    def __init__(self) -> None:
        self.said: list[object] = []
        self.started: list[RankSpec] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.said.append((name, *given))

    def start(self, specs: list[RankSpec], deadline: float) -> list[Any]:
        self.started += specs
        return [Process(spec.rank, self.said) for spec in specs]


@dataclass
class Process:
    """A started rank here."""

    rank: int
    said: list[str]
    host: str = ""

    def kill(self) -> None:
        self.said.append("kill")

    def close(self) -> None:
        self.said.append("close")


class Reached:
    """Host b as its launcher uses it."""

    def __init__(self, number: int, info: HostInfo, credentials: Credentials) -> None:
        self.number, self.info, self.is_gone = number, info, False
        self.orders: list[Any] = []
        self.attached: list[Purpose] = []
        self.connections: list[Any] = []
        self.pids: Any = [11, 12]
        self.patience: list[float] = []

    def send(self, order: Any) -> None:
        self.orders.append(order)

    def ask(self, order: Any) -> Any:
        self.orders.append(order)
        return Prepared(5, 6) if isinstance(order, PrepareWorld) else {"x": "digest"}

    def answer(self, within: float = remote.ANSWER_WITHIN) -> Any:
        self.patience.append(within)
        if isinstance(self.pids, BaseException):
            raise self.pids
        return self.pids

    def attach(self, purpose: Purpose) -> Any:
        self.attached.append(purpose)
        read, write = os.pipe()
        os.close(write)
        self.connections.append(os.fdopen(read))
        return self.connections[-1]

    def drop(self) -> None:
        self.is_gone = True
        for each in self.connections:
            each.close()

    def gone(self) -> LaunchError:
        return LaunchError(f"host {self.info.name} is gone")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(HOSTS, raising=False)
    monkeypatch.setattr(remote, "Host", Reached)
    hosts_file = HostsFile(CREDENTIALS, (FIRST, SECOND), {"A": "1", "B": "1", "C": "1"})
    made: Any = HostsLauncher(Local(), "forkserver", RankProgram("x:y"), hosts_file)  # type: ignore[arg-type]
    monkeypatch.setattr(remote, "be_patient", lambda wire: made._local.said.append(("be_patient", wire)))
    yield made
    for directory in [*made._used]:
        made.end_world(directory)
    made.stop()


def specs_of(directory: str, spread: Any = SPREAD, **key: Any) -> list[RankSpec]:
    return [spec_of(directory, rank, spread=spread, **key) for rank in range(3)]


def test_a_world_is_started_on_all_its_hosts(launcher: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "world-3")
    started = launcher.start(specs_of(directory), remote.time.monotonic() + 100.0)
    world = f"{launcher._token}-world-3"
    host = launcher._hosts[1]
    prestart, prepare, start = host.orders
    assert prestart == Prestart("forkserver", RankProgram("x:y"))
    assert prepare == PrepareWorld(world)
    assert isinstance(start, StartRanks)
    assert (start.world, start.changed, start.removed) == (world, {"A": "2"}, ("C",))
    assert 50 < start.patience <= 100
    assert [(spec.rank, spec.session.environ, spec.gpus) for spec in start.specs] == [
        (1, {}, ()),
        (2, {}, ()),
    ]
    assert host.attached == [Purpose(kind, world, rank) for rank in (1, 2) for kind in ("wire", "end")]
    (here,) = launcher._local.started
    assert (here.rank, here.session.environ) == (0, {"A": "2", "B": "1"})
    assert [each.host for each in started] == ["a", "b", "b"]
    assert [each.pid for each in started[1:]] == [11, 12]
    assert 50 < host.patience[0] - remote.ANSWER_WITHIN <= 100
    assert launcher._local.said == [("be_patient", host.connections[0]), ("be_patient", host.connections[2])]
    ports = launcher._ports[directory]
    assert {port.getsockname()[0] for port in ports} == {"127.0.0.1"}
    place = Place(0, ("a", "b"), 0, 0, 1, "127.0.0.1", "127.0.0.1", ports[1].getsockname()[1])
    assert (here.place, here.port) == (place, ports[0].getsockname()[1])
    moved = (("/w", "/v"), ("/p", "/q"))
    there = replace(place, host=1, number=1, local_size=2, address="127.0.0.2", moved=moved)
    assert [spec.place for spec in start.specs] == [there, replace(there, local_rank=1)]
    assert {spec.port for spec in start.specs} == {here.port}
    launcher.end_world(directory)
    assert host.orders[-1] == EndWorld(world)
    assert [port.fileno() for port in ports] == [-1, -1]
    assert launcher._local.said[-1] == ("end_world", directory)
    launcher.end_world(directory)
    assert host.orders.count(EndWorld(world)) == 1
    launcher.stop()
    assert host.is_gone
    assert launcher._local.said[-1] == ("stop",)


def test_a_world_of_one_host_meets_there(launcher: Any, tmp_path: Path) -> None:
    specs = [spec_of(str(tmp_path), rank, spread=((1, 2),), device="cuda") for rank in range(2)]
    launcher.start(specs, remote.time.monotonic())
    assert launcher._local.started == []
    assert launcher._ports == {}
    start = launcher._hosts[1].orders[-1]
    assert [(spec.port, spec.gpus) for spec in start.specs] == [(5, ("4",))] * 2
    moved = (("/w", "/v"), ("/p", "/q"))
    place = Place(0, ("b",), 1, 0, 2, "127.0.0.2", "127.0.0.2", 0, moved)
    assert [spec.place for spec in start.specs] == [place, replace(place, local_rank=1)]
    assert start.patience == 0.0
    assert launcher._hosts[1].patience == [remote.ANSWER_WITHIN]


def test_a_world_may_have_one_rank_elsewhere(launcher: Any, tmp_path: Path) -> None:
    (started,) = launcher.start([spec_of(str(tmp_path), spread=((0, 1),))], 0.0)
    assert started.host == ""
    (port, _) = launcher._ports[str(tmp_path)]
    assert launcher._local.started[0].port == port.getsockname()[1]
    launcher.host(1).pids = [11]
    (started,) = launcher.start([spec_of(str(tmp_path / "other"), spread=((1, 1),))], 0.0)
    assert (started.host, started.pid) == ("b", 11)
    assert launcher._used.keys() == {str(tmp_path), str(tmp_path / "other")}
    (started,) = launcher.start([spec_of(str(tmp_path / "none"))], 0.0)
    assert launcher._local.started[-1].place.local_size == 1


def test_a_world_that_is_not_spread_is_here(launcher: Any, tmp_path: Path) -> None:
    started = launcher.start(specs_of(str(tmp_path), ()), 0.0)
    assert [each.host for each in started] == [""] * 3
    alone = Place(0, ("a",), 0, 0, 3, "127.0.0.1", "127.0.0.1")
    assert [spec.place for spec in launcher._local.started] == [
        replace(alone, local_rank=rank) for rank in range(3)
    ]
    assert launcher._hosts == {}


def test_no_rank_is_left_where_a_host_does_not_start_its_own(launcher: Any, tmp_path: Path) -> None:
    host = launcher.host(1)
    host.pids = LaunchError("host b: no memory")
    with pytest.raises(LaunchError, match="no memory"):
        launcher.start(specs_of(str(tmp_path)), 0.0)
    asked = [order for order in host.orders if isinstance(order, Signal)]
    assert [(order.rank, order.number) for order in asked] == [(1, 0), (2, 0)]
    assert launcher._local.said[-2:] == ["kill", "close"]


def test_answers_of_other_hosts_are_read_where_ranks_here_do_not_start(launcher: Any, tmp_path: Path) -> None:
    def start(specs: list[RankSpec], deadline: float) -> list[Any]:
        raise LaunchError("no server")

    launcher._local.start = start
    with pytest.raises(LaunchError, match="no server"):
        launcher.start(specs_of(str(tmp_path)), 0.0)
    assert launcher._hosts[1].patience == [remote.ANSWER_WITHIN]


def test_a_host_that_takes_no_connection_of_a_rank_is_dropped(launcher: Any, tmp_path: Path) -> None:
    def attach(purpose: Purpose) -> Any:
        raise OSError

    host = launcher.host(1)
    host.attach = attach
    with pytest.raises(LaunchError, match=r"^host b is gone$"):
        launcher.start(specs_of(str(tmp_path)), 0.0)
    assert host.is_gone


def test_a_host_that_is_gone_is_tried_again_after_a_while(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    launcher._comparison, launcher._compared = object(), {object()}
    first = launcher.host(1)
    assert (launcher._comparison, launcher._compared) == (None, set())
    assert launcher.host(1) is first
    first.drop()
    now += remote.TRY_AGAIN_AFTER - 1
    with pytest.raises(LaunchError, match=r"^host b is gone$"):
        launcher.host(1)
    now += 1
    assert launcher.host(1) is not first
    second = launcher.host(1)
    second.drop()
    back = replace(launcher._hosts_file, hosts=(FIRST, replace(SECOND, port=8)))
    monkeypatch.setattr(remote, "read_hosts_file", lambda: back)
    assert launcher.host(1).info.port == 8


def test_the_servers_of_all_hosts_start_early(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def host(number: int) -> None:
        tried.append(number)
        raise LaunchError("gone")

    monkeypatch.setattr(launcher, "host", host)
    launcher.prestart()
    launcher.expect("m")
    launcher.restore_directory()
    launcher.forget(object())
    launcher.forget(here := RankProcess.__new__(RankProcess))
    assert tried == [1]
    assert launcher._local.said == [("prestart",), ("expect", "m"), ("restore_directory",), ("forget", here)]
    assert launcher.directory == "/tmp/d"


def test_the_code_of_a_file_is_compared_once_for_each_spread(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    difference = ""

    def find(self: CodeComparison, path: Path, hosts: Any) -> str:
        compared.append((path, hosts))
        return difference

    monkeypatch.setattr(CodeComparison, "find_difference", find)
    key = WorldKey(3, "gloo", "cpu", spread=SPREAD)
    for _ in range(2):
        launcher.check_code(Path("x"), Path("/w"), key)
    assert compared == [(Path("x"), {1: "b"})]
    comparison = launcher._comparison
    difference = "x is another one"
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"^x is another one$"):
            launcher.check_code(Path("y"), Path("/w"), key)
    assert len(compared) == 3
    assert launcher._comparison is comparison
    assert launcher.digests(1, ["x"]) == {"x": "digest"}
    assert launcher._hosts[1].orders[-1] == Digest(("x",), (("/w", "/v"), ("/p", "/q")))
