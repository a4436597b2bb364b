"""Processes that tests start: forks of the server, which find what a new interpreter would."""

from __future__ import annotations

import os
import socket
import threading
from multiprocessing import AuthenticationError, connection, reduction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.spawn import multiprocessing_internals
from lockstep.features.spawn.processes import TestProcesses

if TYPE_CHECKING:
    from suites.selftest.project import Run

PROJECT = "spawn/processes"
OPTIONS = ("--ranks-adopt=spawn", "--ranks-adopt-report")
INI = "ranks_adopt_spawn = processes"


def test_they_find_what_new_interpreters_would(run: Run) -> None:
    """Each test of the project is a claim about what a process finds, and what its parent sees of it."""
    assert {name: run.outcome(name) for name in run.cases if run.outcome(name) != "passed"} == {
        "test_fails": "failure"
    }
    assert len(run.cases) == 17


def test_a_failure_names_the_rank_with_rewritten_asserts(run: Run) -> None:
    text = run.failure("test_fails")
    assert text.startswith("rank 1 of 2 failed\nrank 0: was in test_processes.py:")
    assert "E           assert [1, 2] == [1, 3]\n" in text
    assert "ProcessRaisedException: -- Process 1 terminated with the following error:" in text


def test_new_interpreters_are_counted_with_the_reason(run: Run) -> None:
    why = "PYTHONHASHSEED was changed, which a new interpreter reads as it starts"
    assert f"2 processes in new interpreters: {why}" in run.lines


@pytest.mark.parametrize("shown", [b"right", b"wrong"])
def test_the_server_is_shown_its_key(shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of Python 3.14 asks for it before it takes a request."""
    received: list[int] = []

    def serve() -> None:
        client, _ = listener.accept()
        with client, connection.Connection(os.dup(client.fileno())) as authenticated:
            try:
                connection.deliver_challenge(authenticated, b"right")
                connection.answer_challenge(authenticated, b"right")
                received.extend(reduction.recvfds(client, 8))
            except (AuthenticationError, EOFError):
                return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0lockstep-{os.getpid()}")
        listener.listen()
        server = multiprocessing_internals._server
        monkeypatch.setattr(server, "_forkserver_address", listener.getsockname())
        serving = threading.Thread(target=serve)
        serving.start()
        if shown == b"right":
            for descriptor in multiprocessing_internals._request_fork([], shown):
                os.close(descriptor)
        else:
            with pytest.raises(AuthenticationError):
                multiprocessing_internals._request_fork([], shown)
        serving.join()
    for descriptor in received:
        os.close(descriptor)
    assert len(received) == (4 if shown == b"right" else 0)


def test_a_failure_is_that_of_its_own_call_of_spawn() -> None:
    """Each call of `spawn` numbers its processes from 0; other processes are of none."""
    config: Any = None
    processes: Any = TestProcesses(config)
    pids = [(0, 11), (1, 12), (0, 21), (1, 22), (None, 31)]
    processes._of_item = [
        SimpleNamespace(index=index, process=SimpleNamespace(pid=pid)) for index, pid in pids
    ]

    def group_of(pid: int) -> list[int]:
        return [process.pid for process in processes._group_of(pid)]

    assert group_of(12) == [11, 12]
    assert group_of(21) == [21, 22]
    assert group_of(31) == group_of(99) == []
