"""Hosts and ranks elsewhere as a controller sees them, and the launcher that spreads a world over hosts."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError, MessageRefused
from lockstep.features.hosts import remote
from lockstep.features.hosts.code import CodeComparison, _imported_by, _is_installed, digests
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo, HostsFile
from lockstep.features.hosts.orders import (
    Digest,
    EndWorld,
    Fetch,
    Fetched,
    Look,
    Prepared,
    PrepareWorld,
    Prestart,
    Signal,
    StartRanks,
)
from lockstep.features.hosts.remote import Host, HostsLauncher, RemoteRank
from lockstep.features.hosts.wire import Call, Credentials, Purpose
from lockstep.launch.processes import RankProcess, RankProgram
from lockstep.place import Place
from lockstep.specification import RankSpec, SessionSpec, WorldKey

CREDENTIALS = Credentials(b"secret", b"run")
FIRST = HostInfo("a", "127.0.0.1", 0, 2, ("0", "1"), "/w", "/p")
SECOND = HostInfo("b", "127.0.0.2", 7, 2, ("4",), "/v", "/q")
SESSION = SessionSpec((), "/w", (), (), {"A": "2", "B": "1", HOSTS: "x"}, {}, captures=True)
SPREAD = ((0, 1), (1, 2))


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


# A host


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


def spec_of(directory: str, rank: int = 0, **key: Any) -> RankSpec:
    return RankSpec(
        rank,
        WorldKey(**{"size": 3, "backend": "gloo", "device": "cpu"} | key),
        SESSION,
        0,
        directory,
        "/base",
    )


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


# The launcher


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


# Code


def test_a_file_that_differs_is_named_with_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    files = {name: tmp_path / name for name in ("a/test_x.py", "conftest.py", "own.py", "other.py")}
    for name in ("a/test_x.py", "own.py"):
        files[name].write_text(name)
    for name, file, things in (
        ("test_x", "a/test_x.py", "own"),
        ("own", "own.py", "other"),
        ("other", "other.py", "sys"),
    ):
        module = SimpleNamespace(__file__=str(files[file]))
        thing = type(sys)(things)
        module.thing = thing
        module.installed, module.beside = type(sys)("installed"), type(sys)("beside")
        monkeypatch.setitem(sys.modules, name, module)
    for name, place in (("installed", tmp_path / "site-packages"), ("beside", Path(f"{tmp_path}-beside"))):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(place / "z.py")))
    asked: list[tuple[int, list[str]]] = []
    theirs: dict[str, str | None] = {}

    def ask(number: int, paths: list[str]) -> dict[str, str | None]:
        asked.append((number, sorted(paths)))
        return digests(paths) | theirs

    comparison = CodeComparison(tmp_path, ask)
    test, hosts = files["a/test_x.py"], {1: "b", 2: "c"}
    assert comparison.find_difference(test, {1: "b"}) == ""
    everything = sorted(map(str, [*files.values(), tmp_path / "a" / "conftest.py"]))
    assert asked == [(1, everything)]
    assert comparison.find_difference(test, hosts) == ""
    assert asked[1:] == [(2, everything)]
    end = "ranks there would run other code; bring the hosts to the same state"
    for file, digest, what in (
        (test, "x", "a/test_x.py is not the same on host c as on the host that runs pytest"),
        (test, None, "a/test_x.py is missing on host c"),
        (files["conftest.py"], "x", "conftest.py is on host c alone"),
    ):
        theirs = {str(file): digest}
        said = CodeComparison(tmp_path, ask).find_difference(test, {2: "c"})
        assert said == f"{what}: {end}"
    outside = CodeComparison(tmp_path / "a" / "deep", ask)
    theirs = {str(test): None}
    assert outside.find_difference(test, {1: "b"}).startswith(f"{test} is missing on host b: ")
    assert [asked[-1][1]] == [sorted([str(test), str(tmp_path / "a" / "conftest.py")])]


def test_what_a_module_has_imported_is_read_off_its_things() -> None:
    class Odd:
        @property
        def __module__(self) -> str:  # type: ignore[override]
            raise RuntimeError

    def thing() -> None: ...

    module: Any = SimpleNamespace(a=os, b=thing, c=Odd(), d=3, e=SimpleNamespace(__module__=7))
    assert _imported_by(module) == {"os", __name__}
    assert _imported_by(None) == set()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/x/site-packages/y.py", True),
        (f"{sys.prefix}/y.py", True),
        (f"{sys.base_prefix}/lib/y.py", True),
        ("/x/y.py", False),
        (f"{sys.prefix}-other/y.py", False),
    ],
)
def test_files_of_the_environment_are_not_compared(file: str, expected: bool) -> None:
    assert _is_installed(file) is expected


def test_the_digest_of_a_file_is_of_its_contents(tmp_path: Path) -> None:
    one, other, missing = (tmp_path / name for name in ("one", "other", "missing"))
    one.write_bytes(b"x")
    other.write_bytes(b"x")
    found = digests(map(str, (one, other, missing)))
    assert found[str(one)] == found[str(other)] == hashlib.sha256(b"x").hexdigest()
    assert found[str(missing)] is None
