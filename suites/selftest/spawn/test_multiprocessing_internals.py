"""The private names of multiprocessing: a process that the server forks, and who starts processes."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
import threading
from multiprocessing import context, get_context, popen_forkserver, popen_spawn_posix
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.spawn import multiprocessing_internals as module
from lockstep.features.spawn.multiprocessing_internals import ForkedPopen, TooManyDescriptors

Patch = pytest.MonkeyPatch


class Origin:
    """A process that starts others, and notes what it is asked for."""

    key = b"key"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def descriptors(self) -> list[int]:
        return [1, 2]

    def setup(self, method: str) -> object:
        self.said.append(("setup", method, context.get_spawning_popen() is not None))
        return ("setup", method)

    def program(self, process: Any, method: str) -> object:
        return ("program", process.name, method)

    def awaited(self, pid: int, sentinel: int) -> None:
        self.said.append(("awaited", pid, sentinel))

    def began(self, pid: int) -> None:
        self.said.append(("began", pid))

    def ended(self, pid: int, exitcode: int) -> None:
        self.said.append(("ended", pid, exitcode))


PROCESS: Any = SimpleNamespace(name="P-1")


def popen_of(origin: Origin) -> Any:
    """Return a process that runs, without one."""
    popen: Any = object.__new__(ForkedPopen)
    usual = {"method": "spawn", "was_read": False, "was_signalled": False, "_origin": origin}
    vars(popen).update(usual, pid=12, sentinel=5, returncode=None)
    return popen


@pytest.fixture
def base(monkeypatch: Patch) -> list[Any]:
    """The questions to multiprocessing's own class: all processes have exited with 3."""
    asked: list[Any] = []

    def answer(name: str) -> Any:
        def method(self: Any, *given: Any) -> int:
            asked.append((name, *given))
            if name in ("poll", "wait"):
                self.returncode = 3
            return 3

        return method

    for name in ("poll", "wait", "_send_signal"):
        monkeypatch.setattr(module._base, name, answer(name))
    return asked


def test_a_wait_without_a_limit_is_announced(base: list[Any]) -> None:
    origin = Origin()
    assert popen_of(origin).wait(1.5) == 3
    assert origin.said == []
    popen = popen_of(origin)
    assert [popen.wait(), popen.wait()] == [3, 3]
    assert (origin.said, base) == ([("awaited", 12, 5)], [("wait", 1.5), ("wait", None), ("wait", None)])


def test_the_end_of_a_process_is_announced_once(base: list[Any]) -> None:
    origin = Origin()
    popen = popen_of(origin)
    assert popen.poll() == 3
    assert origin.said == [("ended", 12, 3)]
    assert popen.poll() == 3
    assert (origin.said, popen.was_read) == ([("ended", 12, 3)], False)
    assert base == [("poll", os.WNOHANG)] * 2


def test_a_process_that_runs_has_not_ended(monkeypatch: Patch) -> None:
    origin = Origin()
    monkeypatch.setattr(module._base, "poll", lambda self, flag: None)
    assert popen_of(origin).poll(7) is None
    assert origin.said == []


def test_an_exit_code_that_was_read_or_asked_for_is_seen(base: list[Any]) -> None:
    process: Any = get_context("spawn").Process()
    process._popen = popen = popen_of(Origin())
    process._parent_pid = os.getpid()
    assert module.is_unseen(process)
    assert module.exit_code_of(process) == 3
    assert module.is_unseen(process)
    assert process.exitcode == 3
    assert (popen.was_read, module.is_unseen(process)) == (True, False)
    popen.poll()
    assert popen.was_read
    process._popen = popen = popen_of(Origin())
    popen._send_signal(15)
    assert (popen.was_signalled, module.is_unseen(process), base[-1]) == (True, False, ("_send_signal", 15))
    assert module.start_method_of(process) == "spawn"
    process._popen = SimpleNamespace(poll=lambda: None, method="fork")
    assert (module.is_unseen(process), module.start_method_of(process)) == (False, "fork")
    process._popen = None
    assert (module.exit_code_of(process), module.start_method_of(process)) == (None, "")


@pytest.fixture
def server(monkeypatch: Patch) -> dict[str, Any]:
    """The orders that the server is sent; its answer is the pid 77, and that the process is ready."""
    seen: dict[str, Any] = {}

    def request(descriptors: list[int], key: bytes | None) -> tuple[int, int]:
        seen["descriptors"], seen["key"] = [*descriptors], key
        os.write(descriptors[0], b"1")
        answer, status = os.pipe()
        source, sink = os.pipe()
        os.write(status, (77).to_bytes(8, sys.byteorder))
        os.close(status)
        seen["source"] = source
        return answer, sink

    monkeypatch.setattr(module, "_request_fork", request)
    return seen


def test_a_process_is_forked_with_what_its_parent_gives(server: dict[str, Any]) -> None:
    origin, before = Origin(), set(os.listdir("/proc/self/fd"))
    popen: Any = ForkedPopen(PROCESS, "forkserver", origin)  # type: ignore[arg-type]
    assert (popen.pid, popen.method, popen.was_read, popen.was_signalled) == (77, "forkserver", False, False)
    assert origin.said == [("setup", "forkserver", True), ("began", 77)]
    assert context.get_spawning_popen() is None
    assert (server["descriptors"][1:], server["key"]) == ([1, 2], b"key")
    popen.finalizer()
    with os.fdopen(server["source"], "rb") as sent:
        prepared, program = pickle.load(sent), pickle.load(sent)
    assert (prepared["name"], program) == ("P-1", ("program", "P-1", "forkserver"))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_process_with_too_many_descriptors_is_refused(server: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr(Origin, "descriptors", lambda self: [1] * module.MAX_DESCRIPTORS)
    before, count = set(os.listdir("/proc/self/fd")), module.MAX_DESCRIPTORS + 1
    origin = Origin()
    with pytest.raises(TooManyDescriptors, match=rf"\Aits arguments have {count} file descriptors\Z"):
        ForkedPopen(PROCESS, "spawn", origin)  # type: ignore[arg-type]
    assert origin.said == [("setup", "spawn", True)]
    assert set(os.listdir("/proc/self/fd")) <= before
    monkeypatch.setattr(Origin, "descriptors", lambda self: [1] * (module.MAX_DESCRIPTORS - 1))
    ForkedPopen(PROCESS, "spawn", origin).finalizer()  # type: ignore[arg-type]
    os.close(server["source"])


def test_a_request_leaves_no_descriptors_where_the_server_is_gone(monkeypatch: Patch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0lockstep-gone-{os.getpid()}")
        listener.listen()
        monkeypatch.setattr(module._server, "_forkserver_address", listener.getsockname())

        def refuse(client: object, given: list[int]) -> None:
            assert given[0] == given[2]
            assert given[4:] == [1, 2]
            raise ConnectionError("gone")

        monkeypatch.setattr(module.reduction, "sendfds", refuse)
        module._tracker.ensure_running()
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(ConnectionError, match="gone"):
            module._request_fork([1, 2], None)
        assert set(os.listdir("/proc/self/fd")) <= before


def test_both_contexts_start_processes_by_the_function_for_a_while() -> None:
    before = popen_spawn_posix.Popen, popen_forkserver.Popen
    with module.processes_started_by(lambda process, method: (process, method)):
        made: list[Any] = [popen_spawn_posix.Popen("a"), popen_forkserver.Popen("b")]  # type: ignore[arg-type]
        with module.processes_not_replaced():
            assert (popen_spawn_posix.Popen, popen_forkserver.Popen) == (module._spawn_popen, module._base)
        made.append(popen_forkserver.Popen("c"))  # type: ignore[arg-type]
    assert made == [("a", "spawn"), ("b", "forkserver"), ("c", "forkserver")]
    assert (popen_spawn_posix.Popen, popen_forkserver.Popen) == before


def test_small_names_are_those_of_multiprocessing(monkeypatch: Patch) -> None:
    process: Any = get_context("spawn").Process(target=print, args=(1,))
    assert module.target_of(process) == (print, (1,))
    assert module.bootstrap(SimpleNamespace(_bootstrap=lambda sentinel: sentinel + 1), 4) == 5  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_server", SimpleNamespace(_forkserver_authkey=b"key"))
    assert module.server_key() == b"key"
    monkeypatch.setattr(module, "_server", SimpleNamespace())
    assert module.server_key() is None
    for found, expected in (([3, 4], [3, 4]), (None, [])):
        forks = SimpleNamespace(get_inherited_fds=lambda found=found: found)
        monkeypatch.setattr(module, "forkserver", forks)
        assert module.inherited_descriptors() == expected
    asked: list[Any] = []
    util = SimpleNamespace(_run_finalizers=asked.append, _flush_std_streams=lambda: asked.append("flushed"))
    monkeypatch.setattr(module, "_util", util)
    module.end_pools()
    module.flush_streams()
    assert asked == [0, "flushed"]
    monkeypatch.setattr(module, "_spawn_popen", lambda process: ("new", process))
    assert module.start_new_interpreter(process) == ("new", process)


@pytest.mark.parametrize(
    ("value", "shares"),
    [
        (torch.zeros(1), True),
        (get_context("spawn").Pipe()[0], True),
        (functools.partial(print), False),
        (threading.Event().set, False),
        ([].append, False),
        ((1).__add__, False),
        (1, False),
    ],
    ids=["tensor", "pipe", "partial", "method", "descriptor", "wrapper", "number"],
)
def test_a_value_that_processes_share_is_known_by_its_type(value: object, shares: bool) -> None:
    assert module.shares_state(type(value)) is shares
