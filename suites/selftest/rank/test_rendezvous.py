"""Code that reads the launcher's environment meets its peers on ranks."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch.distributed as dist

from lockstep.place import Place
from lockstep.protocol import MEETING, Issued
from lockstep.rank import rendezvous as module
from lockstep.rank.rendezvous import NO_TIMEOUT, Rendezvous, Stores
from lockstep.rank.status import Activity
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from suites.selftest.project import Project


@pytest.mark.parametrize("workers", [(), ("-n4", "-pxdist")], ids=["one-controller", "four-workers"])
def test_groups_from_the_environment_meet_again_and_again(project: Project, workers: tuple[str, ...]) -> None:
    project.copy("launcher", "ranks_leaks = error")
    assert "6 passed" in project.run(*workers).splitlines()[-1]


# In this process

PLACE = Place(0, ("a", "b"), 0, 1, 2, "10.0.0.2", "10.0.0.1", 7000)
SESSION = SessionSpec((), "/", (), (), {}, {}, captures=True)
SPEC = RankSpec(1, WorldKey(2, "gloo", "cpu", has_group=False), SESSION, 0, "/private", "", port=5000)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The torch and the sockets that stores ask."""
    mock = Mock()
    monkeypatch.setattr(module, "dist", mock)
    monkeypatch.setattr(module, "socket", mock.socket)
    return mock


def test_ranks_of_one_host_meet_in_a_file(torch: Any) -> None:
    assert Stores(SPEC).make("name", 3) is torch.FileStore.return_value
    assert torch.mock_calls == [call.FileStore("/private/name", 3)]


@pytest.mark.parametrize(("device", "is_eager"), [("cpu", True), ("cuda", False)])
def test_groups_of_a_world_on_cpus_meet_in_an_eager_file(
    torch: Any, monkeypatch: pytest.MonkeyPatch, device: str, is_eager: bool
) -> None:
    monkeypatch.setattr(module, "EagerFileStore", torch.EagerFileStore)
    spec = dataclasses.replace(SPEC, key=WorldKey(2, "gloo", device, has_group=True))
    store = Stores(spec).make("name", 3, is_eager=True)
    assert store is (torch.EagerFileStore if is_eager else torch.FileStore).return_value


def test_an_eager_store_serves_as_long_as_torch_has_it(tmp_path: Path) -> None:
    key = WorldKey(1, "gloo", "cpu", has_group=True)
    stores = Stores(dataclasses.replace(SPEC, key=key, directory=str(tmp_path)))
    first = dist.PrefixStore("group", stores.make("first", 1, is_eager=True))
    stores.make("second", 1, is_eager=True)
    first.set("key", "value")
    assert first.get("key") == b"value"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts_meet_at_a_server_of_the_first(torch: Any, rank: int) -> None:
    stores = Stores(dataclasses.replace(SPEC, rank=rank))
    stores.reach_server(PLACE)
    listening = torch.socket.create_server.return_value.detach.return_value if rank == 0 else None
    server = call.TCPStore(
        "10.0.0.1",
        7000,
        is_master=rank == 0,
        timeout=NO_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    listens = [call.socket.create_server(("10.0.0.2", 7000)), call.socket.create_server().detach()]
    assert torch.mock_calls == [*(listens if rank == 0 else []), server]
    torch.reset_mock()
    stores.reach_server(PLACE)
    assert torch.mock_calls == []
    assert stores.make("name", 3) is torch.PrefixStore.return_value
    assert torch.mock_calls == [call.PrefixStore("name", torch.TCPStore.return_value)]


Makes = Callable[..., Any]


class Meetings(Rendezvous):
    """The rendezvous of a rank, whose torch is a function that a test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: RankSpec = SPEC) -> None:
        self.made: list[tuple[str, int]] = []
        self.environ: dict[str, str] = {}
        self.replaced: list[Makes] = []
        self.wrapped: list[Makes] = []
        monkeypatch.setattr(module, "os", SimpleNamespace(environ=self.environ))
        monkeypatch.setattr(module, "replace_store_maker", self.replace)
        monkeypatch.setattr(module, "wrap_init_process_group", self.wrapped.append)
        stores: Any = SimpleNamespace(make=lambda *given: self.made.append(given))
        self.activity = Activity(item=6)
        super().__init__(spec, self.activity, stores)

    def replace(self, make: Makes) -> Makes:
        self.replaced.append(make)
        return lambda *given, **named: ("torch", given, named)


def test_the_environment_leads_to_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings(monkeypatch)
    meetings.install()
    assert meetings.environ == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}
    assert meetings.replaced == [meetings._make]
    assert meetings.wrapped == [meetings._count]
    spec = dataclasses.replace(SPEC, place=PLACE, key=WorldKey(2, "gloo", "cpu"))
    others = Meetings(monkeypatch, spec)
    others.install()
    assert others.environ == {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    assert others.wrapped == []
    others._make("10.0.0.1", 5000, 1, 2)
    assert others._make("127.0.0.1", 5000, 1, 2)[0] == "torch"
    assert others.made == [("meeting-6-2-1", 2)]


def test_meetings_are_numbered_by_item_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings(monkeypatch)
    meetings.install()
    for host, size in (("127.0.0.1", 2), ("localhost", 2), ("localhost", 1), ("localhost", 3)):
        meetings._make(host, 5000, 1, size)
    meetings.activity.item = 7
    meetings._make("localhost", 5000, 1, 2)
    assert meetings.made == [
        *(("meeting-6-2-1", 2), ("meeting-6-2-2", 2), ("meeting-6-1-1-of-1", 1), ("meeting-6-3-1", 3)),
        ("meeting-7-2-1", 2),
    ]


@pytest.mark.parametrize(("host", "port"), [("localhost", 5001), ("10.0.0.1", 5000)])
def test_meetings_elsewhere_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    meetings = Meetings(monkeypatch)
    meetings.install()
    assert meetings._make(host, port, 1, 2, 3, a=4) == ("torch", (host, port, 1, 2, 3), {"a": 4})
    assert meetings.made == []


class Init:
    """A `dist.init_process_group` that looks at the meeting of the rank."""

    def __init__(self, meetings: Meetings) -> None:
        self.meetings = meetings
        self.seen: list[Issued | None] = []
        self.given: list[tuple[Any, ...]] = []

        def init_process_group(
            backend: str | None = None, *, world_size: int = -1, timeout: datetime.timedelta | None = None
        ) -> str:
            self.seen.append(meetings.activity.meeting)
            if backend == "none":
                raise ValueError("no such backend")
            self.given.append((backend, world_size, timeout))
            return "made"

        self.call: Any = meetings._count(init_process_group)  # type: ignore[arg-type]


MEETS = Issued(MEETING, (), 1, "init_process_group", (), (), in_flight=True, timeout=math.inf)


def test_a_call_for_all_ranks_is_counted_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings(monkeypatch)
    init = Init(meetings)
    timeout = datetime.timedelta(minutes=1)
    assert init.call("gloo", world_size=2, timeout=timeout) == "made"
    assert init.given == [("gloo", 2, timeout)]
    first = dataclasses.replace(MEETS, timeout=60.0)
    assert init.seen == [first]
    assert meetings.activity.meeting == dataclasses.replace(first, in_flight=False)
    meetings.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ValueError, match="no such backend"):
        init.call("none")
    assert init.seen[1:] == [dataclasses.replace(MEETS, number=2)]
    assert meetings.activity.meeting == dataclasses.replace(MEETS, number=2, in_flight=False)
    assert init.call.__name__ == "init_process_group"


def test_a_call_for_some_ranks_or_with_other_arguments_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings(monkeypatch)
    init = Init(meetings)
    meetings.environ["WORLD_SIZE"] = "2"
    assert init.call("gloo", world_size=1) == "made"
    with pytest.raises(TypeError, match="unknown"):
        init.call(unknown=1)
    meetings.environ["WORLD_SIZE"] = "3"
    init.call("gloo")
    del meetings.environ["WORLD_SIZE"]
    init.call("gloo")
    assert init.seen == [None, None, None]
    assert meetings.activity.meeting is None
