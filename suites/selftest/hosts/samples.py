"""Two hosts, and the specifications of ranks of worlds on them."""

from __future__ import annotations

from typing import Any

from lockstep.features.hosts.hosts_file import HOSTS, HostInfo
from lockstep.features.hosts.wire import Credentials
from lockstep.specification import RankSpec, SessionSpec, WorldKey

CREDENTIALS = Credentials(b"secret", b"run")
FIRST = HostInfo("a", "127.0.0.1", 0, 2, ("0", "1"), "/w", "/p")
SECOND = HostInfo("b", "127.0.0.2", 7, 2, ("4",), "/v", "/q")
SESSION = SessionSpec((), "/w", (), (), {"A": "2", "B": "1", HOSTS: "x"}, {}, captures=True)
SPREAD = ((0, 1), (1, 2))


def spec_of(directory: str, rank: int = 0, **key: Any) -> RankSpec:
    return RankSpec(
        rank,
        WorldKey(**{"size": 3, "backend": "gloo", "device": "cpu"} | key),
        SESSION,
        0,
        directory,
        "/base",
    )
