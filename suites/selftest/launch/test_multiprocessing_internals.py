"""The private names of multiprocessing: a server that starts and stops, its directory, and its pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.launch import multiprocessing_internals as module

USUAL = signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a start of a server; none is started."""
    done: list[Any] = []

    def blocked() -> set[Any]:
        return set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) - set(USUAL)

    def start() -> None:
        main = sys.modules["__main__"]
        done.append(("server", blocked(), type(main), main.__name__, vars(main).get("__file__")))

    server = SimpleNamespace(set_forkserver_preload=done.append, ensure_running=start)
    monkeypatch.setattr(module, "forkserver", server)
    tracker = SimpleNamespace(ensure_running=lambda: done.append(("tracker", blocked())))
    monkeypatch.setattr(module, "resource_tracker", tracker)
    return done


def test_a_server_starts_with_signals_blocked_and_without_the_main_module(steps: list[Any]) -> None:
    main = sys.modules["__main__"]
    module.start_server("a.module", (signal.SIGTERM, signal.SIGHUP))
    assert steps == [
        ["a.module"],
        ("tracker", set()),
        ("server", {signal.SIGTERM, signal.SIGHUP}, ModuleType, "__main__", None),
    ]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == USUAL
    assert sys.modules["__main__"] is main


def test_signals_and_the_main_module_are_back_where_no_server_starts(
    steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no process")

    monkeypatch.setattr(module.forkserver, "ensure_running", fail)
    main = sys.modules["__main__"]
    with pytest.raises(OSError, match="no process"):
        module.start_server("a.module", (signal.SIGTERM,))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == USUAL
    assert sys.modules["__main__"] is main


def test_a_server_is_known_by_its_pid_and_stops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    def stop() -> None:
        stopped.append("stopped")
        raise FileNotFoundError("its socket")

    monkeypatch.setattr(module, "_server", SimpleNamespace(_forkserver_pid=77, _stop=stop))
    assert module.server_pid() == 77
    module.stop_server()
    assert stopped == ["stopped"]


def test_a_fork_closes_the_pipe_that_keeps_the_server_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    end, other = os.pipe()
    server = SimpleNamespace(_forkserver_alive_fd=end)
    monkeypatch.setattr(module, "_server", server)
    for _ in range(2):
        module.close_server_pipe()
        assert server._forkserver_alive_fd is None
    with pytest.raises(OSError):
        os.fstat(end)
    os.close(other)


@pytest.mark.parametrize(
    ("chosen", "used"),
    [
        ("/t" * 35, "/t" * 35),
        (f"{'/t' * 35}x", "/tmp"),
        ("/\u00e9" * 23, "/\u00e9" * 23),
        ("/\u00e9" * 24, "/tmp"),
        ("/\udcff", "/tmp"),
    ],
    ids=["seventy", "longer", "bytes", "more-bytes", "no-utf-8"],
)
def test_sockets_are_made_where_their_names_are_short(
    monkeypatch: pytest.MonkeyPatch, chosen: str, used: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", chosen)
    monkeypatch.setattr(module, "util", SimpleNamespace(get_temp_dir=lambda: f"{tempfile.tempdir}/made"))
    assert module.private_directory() == f"{used}/made"
    assert tempfile.tempdir == chosen


def test_the_temporary_directory_stays_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError("no space")

    monkeypatch.setattr(tempfile, "tempdir", "/t" * 40)
    monkeypatch.setattr(module, "util", SimpleNamespace(get_temp_dir=fail))
    with pytest.raises(OSError, match="no space"):
        module.private_directory()
    assert tempfile.tempdir == "/t" * 40


def test_a_rank_forgets_how_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        multiprocessing, "set_start_method", lambda *given, **named: asked.append((given, named))
    )
    module.forget_start_method()
    assert asked == [((None,), {"force": True})]
