"""Cutting connections while peers and other threads close them too."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from harness.rank import process_group
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
        group.sever()
        assert theirs.recv(1) == b""
