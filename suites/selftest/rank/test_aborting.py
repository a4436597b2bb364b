"""Connections that are shut down while others close them, and answers in spite of failures."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lockstep.backends import gloo
from lockstep.protocol import Probe, RankStatus
from lockstep.rank import flight_record
from lockstep.rank.process_group import DefaultGroup
from lockstep.rank.status import Activity, StatusReader
from suites.selftest.project import Project


def test_connections_that_are_already_closed_are_skipped(monkeypatch: Any) -> None:
    group: Any = DefaultGroup.__new__(DefaultGroup)
    group._spec = SimpleNamespace(key=SimpleNamespace(has_group=True))
    group._backends = [gloo.Gloo()]
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as unconnected:
        closed = os.dup(unconnected.fileno())
        os.close(closed)
        fds = [closed, unconnected.fileno(), ours.fileno()]
        monkeypatch.setattr(gloo, "_connections", lambda: fds)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        group.abort()
        assert theirs.recv(1) == b""


def test_connections_are_found_without_proc(monkeypatch: Any) -> None:
    """Among as many descriptors as may be open at once, or the first 65,536 where that is no limit."""

    def fail(path: str) -> list[str]:
        raise OSError(path)

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 60)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        assert ours.fileno() not in [*gloo._connections()]
        os.set_inheritable(ours.fileno(), True)  # as gloo leaves its sockets
        assert ours.fileno() in [*gloo._connections()]


def test_a_rank_whose_status_cannot_be_read_answers_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(flight_record, "recorded_collectives", lambda: 1 // 0)
    group: Any = SimpleNamespace(joined=0, has_begun=lambda at: True)
    answer = StatusReader(Activity("votes"), group, "/base").answer(Probe())
    assert isinstance(answer, RankStatus)
    assert (answer.where, answer.state) == ("an unknown place", "votes")
    assert "ZeroDivisionError" in answer.stacks


def test_cases_that_fail_with_a_collective_in_flight_get_new_groups(project: Project) -> None:
    """Its connections are closed while it begins to send: in one of about 20 cases it never ends."""
    project.write("""
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
def test_cases(world, run_subtests):
    def claim(number):
        dist.all_reduce(torch.ones(3), async_op=True)
        raise AssertionError

    run_subtests({"number": list(range(60))}, claim)
""")
    output = project.run("-q", "--tb=no", "--world-timeout=60")
    assert "61 failed" in output  # the test itself, too
    assert "deadline" not in output
