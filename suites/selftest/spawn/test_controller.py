"""The start of processes of tests that run in the controller, without a server."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller.requests import REQUEST
from lockstep.exceptions import LaunchError
from lockstep.features.spawn import controller as controllers
from lockstep.features.spawn.child import Server
from lockstep.features.spawn.controller import SpawnAdoption
from lockstep.features.spawn.starter import Starter


class Adoption:
    """The adoption of processes, with parts that note what they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Any] = []
        self.launcher: Any = SimpleNamespace(forks=True, directory=str(folder))
        self.why_not = ""
        self.error: Exception | None = None
        self.ran = ""
        processes = SimpleNamespace(
            begin=lambda item: self.said.append("begin"),
            add=lambda started: self.said.append(("add", started.why_not)),
            await_context="await_context",
            await_process="await_process",
        )
        worlds = SimpleNamespace(why_not=lambda item, spawn: self.why_not, run=self.run_on_world)
        counts = SimpleNamespace(add=lambda *given: self.said.append(given))
        self.made: Any = SpawnAdoption(SimpleNamespace(), self.ready, worlds, processes, counts)  # type: ignore[arg-type]

    def ready(self) -> Any:
        self.said.append("ready")
        if isinstance(self.launcher, Exception):
            raise self.launcher
        return self.launcher

    def run_on_world(self, item: Any, spawn: Any, server: Server) -> tuple[str, Exception | None]:
        self.said.append(("run", spawn.function, server.directory))
        return self.ran, self.error


@pytest.fixture
def adoption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adoption:
    monkeypatch.setattr(controllers, "server_pid", lambda: 77)
    monkeypatch.setattr(controllers, "is_running", lambda pid: True)
    monkeypatch.setattr(controllers, "_environ_of", lambda pid: {**os.environ, "PID": str(pid)})
    monkeypatch.setattr(controllers, "server_key", lambda: b"key")
    monkeypatch.setattr(controllers, "rewritten_modules", lambda config: ("m",))
    monkeypatch.setattr(controllers, "start_new_interpreter", lambda process: ("new", process))
    return Adoption(tmp_path)


def test_processes_are_started_by_the_server_that_runs(
    adoption: Adoption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(Starter, "start", lambda self, *given: started.append((self, *given)) or "popen")
    process: Any = SimpleNamespace()
    assert adoption.made._start(process, "spawn") == "popen"
    ((starter, *given),) = started
    assert given == [process, "spawn"]
    assert starter.server == Server(str(tmp_path), {**os.environ, "PID": "77"}, b"key")
    assert (starter._rewritten(), starter.awaited) == (("m",), "await_process")
    assert (tmp_path / "spawned").stat().st_mode & 0o777 == 0o700
    assert adoption.made.processes.directory == str(tmp_path)
    starter._observe(SimpleNamespace(why_not=""))
    starter._observe(SimpleNamespace(why_not="x"))
    assert adoption.said == [
        "ready",
        ("add", ""),
        ("from the server", ""),
        ("add", "x"),
        ("in new interpreters", "x"),
    ]
    adoption.said.clear()
    assert adoption.made._find_starter() is starter
    assert adoption.said == []
    monkeypatch.setattr(controllers, "is_running", lambda pid: pid != 77)
    assert adoption.made._find_starter() is not starter
    assert adoption.said == ["ready"]


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        (None, "the run is on several hosts"),
        (SimpleNamespace(forks=False), "ranks_start_method = spawn"),
        (LaunchError("no memory"), "no memory"),
    ],
)
def test_processes_are_new_interpreters_where_there_is_no_server(
    adoption: Adoption, launcher: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adoption.launcher = launcher
    monkeypatch.setattr(controllers.Started, "of", lambda process, why_not: SimpleNamespace(why_not=why_not))
    for _ in range(2):
        assert adoption.made._start("process", "spawn") == ("new", "process")
    assert adoption.said == ["ready", *[("add", why), ("in new interpreters", why)] * 2]
    adoption.said.clear()
    assert not adoption.made._spawn(None, SimpleNamespace(function="f"))
    assert adoption.said == [("not on warm ranks", why)]


def test_a_call_of_spawn_runs_on_a_world(adoption: Adoption, tmp_path: Path) -> None:
    spawn: Any = SimpleNamespace(function="f")
    assert adoption.made._spawn(None, spawn)
    assert adoption.said == ["ready", ("run", "f", str(tmp_path)), ("on warm ranks", "")]
    adoption.error = ValueError("of a rank")
    with pytest.raises(ValueError, match="of a rank"):
        adoption.made._spawn(None, spawn)
    assert adoption.said[-1] == ("on warm ranks", "")
    adoption.error, adoption.ran = None, "it cannot"
    assert not adoption.made._spawn(None, spawn)
    assert adoption.said[-1] == ("not on warm ranks", "it cannot")
    adoption.said.clear()
    adoption.why_not = "the call joins nothing"
    assert not adoption.made._spawn(None, spawn)
    assert adoption.said == [("not on warm ranks", "the call joins nothing")]


def test_a_variable_that_is_read_early_keeps_a_call_off_worlds(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    adoption.made._find_starter()
    adoption.said.clear()
    monkeypatch.setenv("MKL_OF_TEST", "1")
    assert not adoption.made._spawn(None, SimpleNamespace(function="f"))
    assert adoption.said == [("not on warm ranks", "MKL_OF_TEST was changed, which is read early")]


def test_processes_are_adopted_while_an_item_runs_here(
    adoption: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    wraps: list[Any] = []
    noted: list[Any] = []

    def replacing(name: str) -> Any:
        @contextmanager
        def replaced(by: Any) -> Any:
            noted.append((name, by))
            yield
            noted.append(f"end of {name}")

        return replaced

    for name in ("processes_started_by", "start_processes_replaced", "joins_preceded"):
        monkeypatch.setattr(controllers, name, replacing(name))
    item: Any = SimpleNamespace(stash=pytest.Stash())
    protocol = adoption.made.pytest_runtest_protocol(item)
    next(protocol)
    assert adoption.said == ["begin"]
    (_, start), (_, wrap), (_, joins) = noted
    assert (start, joins) == (adoption.made._start, "await_context")
    with pytest.raises(StopIteration) as over:
        protocol.send(True)
    assert over.value.value is True
    assert noted[3:] == [
        "end of joins_preceded",
        "end of start_processes_replaced",
        "end of processes_started_by",
    ]

    def original(fn: Any, *args: Any, **kwargs: Any) -> str:
        """Start processes."""
        wraps.append((fn, args, kwargs))
        return "context"

    call = wrap(original)
    assert call.__doc__ == "Start processes."
    assert call(print, (1,), nprocs=2) is None
    assert wraps == []
    adoption.why_not = "no"
    assert call(print, (1,), nprocs=2) == "context"
    assert wraps == [(print, ((1,),), {"nprocs": 2})]
    adoption.why_not = ""
    pid = os.getpid()
    monkeypatch.setattr(controllers.os, "getpid", lambda: pid + 1)
    assert call(print) == "context"


def test_an_item_on_ranks_has_processes_of_its_ranks(adoption: Adoption) -> None:
    item: Any = SimpleNamespace(stash=pytest.Stash())
    item.stash[REQUEST] = object()
    protocol = adoption.made.pytest_runtest_protocol(item)
    next(protocol)
    with pytest.raises(StopIteration) as over:
        protocol.send(True)
    assert (over.value.value, adoption.said) == (True, [])


def test_a_report_is_completed(adoption: Adoption, monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[Any] = []
    monkeypatch.setattr(controllers, "complete_report", lambda *given: completed.append(given))
    making = adoption.made.pytest_runtest_makereport("item", "call")
    next(making)
    with pytest.raises(StopIteration) as over:
        making.send("report")
    assert over.value.value == "report"
    assert completed == [("item", "call", "report", adoption.made.processes)]


def test_the_environment_of_a_process_is_that_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers.Path, "read_bytes", lambda path: b"A=1=2\0B=\0none\0C=\xff\0")
    assert controllers._environ_of(5) == {"A": "1=2", "B": "", "C": "\udcff"}

    def read(path: Path) -> bytes:
        raise OSError(str(path))

    monkeypatch.setattr(controllers.Path, "read_bytes", read)
    assert controllers._environ_of(5) == dict(os.environ)
