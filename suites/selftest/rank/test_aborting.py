"""Cutting connections while peers and other threads close them too, and answering through failures."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from harness.rank import process_group
from harness.rank.process import Rank
from harness.rank.process_group import DefaultGroup


def test_connections_that_others_have_closed_meanwhile_do_not_keep_the_rest(monkeypatch: Any) -> None:
    group: Any = DefaultGroup.__new__(DefaultGroup)
    group._spec = type("Spec", (), {"key": type("Key", (), {"backend": "gloo"})})
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as unconnected:
        closed = os.dup(unconnected.fileno())
        os.close(closed)
        fds = [closed, unconnected.fileno(), ours.fileno()]
        monkeypatch.setattr(process_group, "_gloo_connections", lambda: fds)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        group.abort()
        assert theirs.recv(1) == b""


def test_a_rank_that_cannot_tell_what_it_does_says_so_and_answers_on() -> None:
    said: list[Any] = []
    rank: Any = Rank.__new__(Rank)
    rank._progress, rank._state, rank.send = None, "votes", said.append
    rank.collectives = lambda: 1 // 0
    rank._answer(0, False)
    (doing,) = said
    assert (doing.where, doing.state) == ("an unknown place", "votes")
    assert "ZeroDivisionError" in doing.stacks
