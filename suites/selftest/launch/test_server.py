"""The steps of the server, in a process that is none."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch import server

NAMES = {"modules": ["of_rank"], "preload": ["own"], "hints": ["hint", "no_hint"]}


class Exited(BaseException):
    """The process would end here."""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of the server in its process, in order."""
    noted: list[Any] = []

    def note(*words: Any) -> Any:
        return lambda *given: noted.append((*words, *given))

    def import_module(name: str) -> None:
        noted.append(("import", name))
        if name in FAIL:
            raise FAIL[name]

    def leave(code: int) -> None:
        noted.append(("exit", code))
        raise Exited

    handlers: dict[int, Any] = {}

    def handle(number: int, handler: Any) -> None:
        noted.append(("signal", number))
        handlers[number] = handler

    fakes: dict[str, Any] = {
        "importlib": SimpleNamespace(import_module=import_module),
        "gc": SimpleNamespace(disable=note("gc off"), freeze=note("freeze")),
        "atexit": SimpleNamespace(register=note("atexit")),
        "signal": SimpleNamespace(
            signal=handle,
            getsignal=handlers.get,
            setitimer=note("timer"),
            ITIMER_REAL=signal.ITIMER_REAL,
            SIGALRM=signal.SIGALRM,
            SIGKILL=signal.SIGKILL,
            SIG_DFL=signal.SIG_DFL,
        ),
        "adopt_orphans": note("adopt"),
        "warnings": SimpleNamespace(filterwarnings=note("filter")),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(server, name, fake)
    monkeypatch.setattr(server.os, "_exit", leave)
    monkeypatch.setattr(server.os, "register_at_fork", lambda **given: handlers.update(given))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    noted.append(handlers)
    return noted


FAIL: dict[str, BaseException] = {
    "of_rank": ImportError("no module"),
    "own": SystemExit("ends"),
    "no_hint": SystemExit(3),
}


def test_a_server_imports_what_ranks_need_and_says_what_failed(done: list[Any], tmp_path: Path) -> None:
    path = [*sys.path, "/own"]
    server._prepare(path, NAMES, str(tmp_path), os.getppid())
    steps = done[1:]
    assert sys.path == path
    imported = [step[1] for step in steps if step[0] == "import"]
    assert imported == [*server.EVERY_RANK_IMPORTS, "of_rank", "own", "hint", "no_hint"]
    status = json.loads(server.status_path(str(tmp_path)).read_text())
    assert status["failures"] == {"of_rank": "ImportError: no module", "own": "SystemExit: ends"}
    assert status["threads"] == len(os.listdir("/proc/self/task"))
    assert [file.name for file in tmp_path.iterdir()] == ["server.json"]
    real = signal.ITIMER_REAL
    others = [step for step in steps if step[0] != "import"]
    assert others == [
        ("signal", signal.SIGALRM),
        ("timer", real, server.LOOK_EVERY, server.LOOK_EVERY),
        ("gc off",),
        ("freeze",),
        ("signal", server.IMPORT_MORE),
        ("adopt",),
        ("filter", "ignore", server.STRAY_CHILD_WARNING),
        ("timer", real, 0),
        ("atexit", server._leave, os.getpid(), str(tmp_path)),
    ]
    assert steps.index(("gc off",)) < steps.index(("import", "torch")) < steps.index(("freeze",))
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert sys.excepthook.args == (os.getpid(), str(tmp_path))  # type: ignore[attr-defined]
    assert sys.excepthook.func is server._write_last_words  # type: ignore[attr-defined]


def test_a_server_of_ranks_that_are_spawned_imports_nothing(
    done: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.os, "listdir", lambda path: (_ for _ in ()).throw(OSError()))
    server._prepare([*sys.path], None, str(tmp_path), os.getppid())
    assert [step for step in done[1:] if step[0] == "import"] == []
    status = json.loads(server.status_path(str(tmp_path)).read_text())
    assert status == {"failures": {}, "threads": server.threading.active_count()}


def test_a_server_imports_more_at_a_signal_which_its_forks_forget(done: list[Any], tmp_path: Path) -> None:
    server._import_more_at_a_signal(str(tmp_path))
    handlers = done[0]
    (tmp_path / server.MORE_IMPORTS).write_text(json.dumps(["own", "other"]))
    handlers[server.IMPORT_MORE](0, None)
    assert done[2:] == [("import", "own"), ("import", "other"), ("freeze",)]
    forget = handlers["after_in_child"]
    forget()
    assert handlers[server.IMPORT_MORE] is signal.SIG_DFL
    handlers[server.IMPORT_MORE] = of_test = object()
    forget()
    assert handlers[server.IMPORT_MORE] is of_test


def test_a_server_ends_with_its_controller(done: list[Any], tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    server._end_with(os.getppid(), str(directory))
    look = done[0][signal.SIGALRM]
    look()
    assert directory.exists()
    server._end_with(os.getpid(), str(directory))
    with pytest.raises(Exited):
        done[0][signal.SIGALRM]()
    assert not directory.exists()
    assert done[-1] == ("exit", 0)


def test_a_server_that_ends_kills_the_ranks_that_are_left(
    done: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []

    def killpg(pid: int, number: int) -> None:
        killed.append((pid, number))
        raise ProcessLookupError

    monkeypatch.setattr(server.os, "killpg", killpg)
    monkeypatch.setattr(server, "children_of", lambda pid: {pid})
    monkeypatch.setattr(server, "end", lambda pids, patience: killed.append((pids(), patience)))
    (tmp_path / "d" / "ranks").mkdir(parents=True)
    of_another = (os.getpid(), "1")  # the number of a rank that had started at another time
    for pid, began in ((7, ""), (8, ""), of_another):
        (tmp_path / "d" / "ranks" / str(pid)).write_text(began)
    server._leave(os.getpid() + 1, str(tmp_path / "d"))
    assert killed == []
    with pytest.raises(Exited):
        server._leave(os.getpid(), str(tmp_path / "d"))
    assert sorted(killed[:2]) == [(7, signal.SIGKILL), (8, signal.SIGKILL)]
    assert killed[2:] == [({os.getpid()}, 0.0)]
    assert not (tmp_path / "d").exists()
    with pytest.raises(Exited):
        server._leave(os.getpid(), str(tmp_path / "d"))  # which a test has removed
    assert done[-2:] == [("exit", 0)] * 2


def test_last_words_are_not_waited_for_where_the_directory_is_gone(done: list[Any], tmp_path: Path) -> None:
    with pytest.raises(Exited):
        server._write_last_words(os.getpid(), str(tmp_path / "gone"), type, ValueError("x"))
    assert done[-1] == ("exit", 1)
    assert server.last_words(str(tmp_path / "gone")) == ""
