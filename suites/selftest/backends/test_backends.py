"""Unit tests of the names of backends, and of what a rank does with its own."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import backends
from lockstep.backends import (
    BACKENDS,
    BROKEN_CONNECTION,
    backend_named,
    backends_of,
    check_backend,
    device,
    devices_of,
    meets,
    objects_of,
    takes_devices,
)
from lockstep.backends.backend import AcceleratorBackend, Backend
from lockstep.backends.device import Device, accelerator
from lockstep.backends.gloo import Gloo, _connections
from lockstep.backends.nccl import Nccl
from lockstep.backends.shm import Shm

BOTH = "cpu:gloo,cuda:nccl"
FORM = f"write DEVICE:BACKEND, with a comma between two: {BOTH}"


def test_a_name_means_a_backend_for_each_device() -> None:
    assert backends_of("gloo") == {"cpu": "gloo", "cuda": "gloo"}
    assert backends_of(BOTH) == {"cpu": "gloo", "cuda": "nccl"}
    assert [each.name for each in objects_of(BOTH)] == ["gloo", "nccl"]
    assert [each.name for each in objects_of("cpu:gloo,cuda:gloo")] == ["gloo"]
    names = ["gloo", "nccl", "shm", "fake", BOTH]
    assert [takes_devices(name) for name in names] == [False, True, False, False, True]
    assert [meets(name) for name in names] == [True, True, True, False, True]
    assert [devices_of(name) for name in (*names, "cpu:gloo")] == [
        ("cpu", "cuda"),
        ("cuda",),
        ("cpu",),
        ("cpu", "cuda"),
        ("cuda",),
        ("cpu",),
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tcp", "unknown backend 'tcp'; there are gloo, nccl, shm, fake"),
        (3, "unknown backend 3; there are gloo, nccl, shm, fake"),
        ("", "unknown backend ''; there are gloo, nccl, shm, fake"),
        (":gloo", "backend ':gloo': write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"),
        ("cpu:", "backend 'cpu:': write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"),
        ("cpu:a:b", "backend 'cpu:a:b': write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"),
        (
            "cpu:gloo ",
            "backend 'cpu:gloo ': write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl",
        ),
        ("cpu:tcp", "backend 'cpu:tcp': unknown backend 'tcp'; there are gloo, nccl, shm, fake"),
        ("cpu:fake", "backend 'cpu:fake': a fake world has no other backend: write 'fake'"),
        ("cuda:shm", "backend 'cuda:shm': shm works on cpu, not on 'cuda'"),
        ("mps:gloo", "backend 'mps:gloo': gloo works on cpu and cuda, not on 'mps'"),
        ("cpu:gloo,cpu:shm", "backend 'cpu:gloo,cpu:shm': names cpu twice"),
    ],
)
def test_a_name_that_means_no_backend_says_what_to_write(name: object, why: str) -> None:
    with pytest.raises(ValueError, match="backend") as caught:
        check_backend(name)
    assert str(caught.value) == why


def test_the_backend_of_another_accelerator_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [SimpleNamespace(type="xpu", default_backend="xccl")]
    monkeypatch.setattr(backends, "accelerator", lambda: found[0])
    backend = backend_named("xccl")
    assert (type(backend), backend.name, backend.devices) == (AcceleratorBackend, "xccl", ("xpu",))
    for name in [*BACKENDS, BOTH]:
        check_backend(name)
    check_backend("xpu:xccl,cpu:gloo")
    found[0] = None
    with pytest.raises(ValueError, match=r"^unknown backend 'xccl'"):
        backend_named("xccl")
    found[0] = Device("nonsense")
    with pytest.raises(ValueError, match=r"^unknown backend 'xccl'"):
        backend_named("xccl")


@pytest.mark.parametrize(
    ("message", "how"),
    [
        ("[gloo/x.cc:1] Connection closed by peer [::1]", "Connection closed by peer"),
        ("Gloo connectFullMesh\n failed: Broken pipe", "Broken pipe"),
        ("NCCL error: remote process exited", "remote process exited"),
        ("PeerLost: rank 1 is gone", "gone"),
        ("GroupAborted: its group is no more", ""),
        ("ValueError: Connection closed by peer", None),
    ],
)
def test_an_error_of_a_connection_that_a_peer_has_closed_is_known(message: str, how: str | None) -> None:
    found = BROKEN_CONNECTION.search(message)
    assert (found and next(filter(None, found.groups()), "")) == how if how is not None else found is None


# On a rank


def test_a_backend_has_no_store_record_or_wait_unless_it_says_so() -> None:
    plain = Backend()
    plain.prepare()
    plain.abort(True)
    plain.close_connections()
    assert (plain.store(), plain.record(), plain.wait_of(threading.current_thread())) == (None, [], None)
    assert plain.observe(print) is False


def test_ranks_of_an_accelerator_meet_and_part_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda *args, **kwargs: called.append((args, kwargs)))
    group: Any = object()
    Nccl().barrier(group, SimpleNamespace(index=3))
    Gloo().barrier(group, None)
    assert called == [((group,), {"device_ids": [3]}), ((group,), {})]
    for each in (Nccl(), Gloo()):
        each.leave(lambda: called.append("destroyed"))
    assert called[2:] == ["destroyed"]


def test_groups_of_nccl_are_aborted_where_there_may_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr("lockstep.backends.torch_internals.abort_nccl_groups", lambda: aborted.append("nccl"))
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "cpu:gloo")
    Nccl().abort(False)
    assert aborted == []
    Nccl().abort(True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: BOTH)
    Nccl().abort(False)
    assert aborted == ["nccl", "nccl"]


def test_shared_memory_is_asked_only_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.current_thread()
    shm, called = Shm(), list[Any]()
    monkeypatch.delitem(sys.modules, "lockstep.shm", raising=False)
    shm.close_connections()
    shm.limit_record(3)
    assert (shm.record(), shm.observe(print), shm.wait_of(thread)) == ([], False, None)
    loaded = SimpleNamespace(
        abort_all=lambda: called.append("abort"),
        keep=called.append,
        record=lambda: [{"op": "recv"}],
        observe=called.append,
        waits={thread.ident: "a wait"},
    )
    monkeypatch.setitem(sys.modules, "lockstep.shm", loaded)
    shm.close_connections()
    shm.limit_record(3)
    assert (shm.record(), shm.observe(print), shm.wait_of(thread)) == ([{"op": "recv"}], True, "a wait")
    assert called == ["abort", 3, print]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over TCP, of which the first is open across exec, as gloo's are."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    first.set_inheritable(True)
    with first, second:
        yield first, second


def test_connections_of_gloo_are_those_over_tcp_that_stay_open_across_exec(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    others = socket.socketpair(), (socket.socket(), socket.socket(type=socket.SOCK_DGRAM))
    with others[0][0], others[0][1], others[1][0], others[1][1]:
        others[1][1].connect(("127.0.0.1", 9))
        for each in (*others[0], *others[1]):
            each.set_inheritable(True)
        mine = {first.fileno(), second.fileno(), *(each.fileno() for both in others for each in both)}
        assert mine.intersection(_connections()) == {first.fileno()}

        def not_there(path: str) -> list[str]:
            raise OSError

        monkeypatch.setattr(os, "listdir", not_there)
        monkeypatch.setattr(os, "sysconf", lambda name: 256)
        assert mine.intersection(_connections()) == {first.fileno()}


def test_a_closed_connection_ends_for_both_and_a_detached_one_for_the_child_alone(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    copy = socket.socket(fileno=os.dup(first.fileno()))
    monkeypatch.setattr("lockstep.backends.gloo._connections", lambda: iter([first.fileno()]))
    Gloo().detach()
    assert os.path.samestat(os.fstat(first.fileno()), os.stat(os.devnull))
    second.setblocking(False)
    with pytest.raises(BlockingIOError):
        second.recv(1)
    monkeypatch.setattr("lockstep.backends.gloo._connections", lambda: iter([first.fileno(), copy.fileno()]))
    Gloo().close_connections()
    assert second.recv(1) == b""
    copy.close()


def test_groups_of_gloo_are_dropped_in_threads_that_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    together, never, names = threading.Barrier(3, timeout=30), threading.Event(), []

    class Group:
        def __del__(self) -> None:
            together.wait()
            names.append(threading.current_thread().name)
            never.wait()

    monkeypatch.setattr("lockstep.backends.gloo._DESTROYED_WITHIN", 0.01)
    Gloo().release([Group()], [Group()])
    together.wait()
    never.set()
    for thread in threading.enumerate():
        if thread.name == "destroys-groups":
            thread.join()
    assert names == ["destroys-groups"] * 2


@pytest.mark.parametrize(("policy", "then"), [(os.SCHED_OTHER, [os.SCHED_BATCH]), (os.SCHED_IDLE, [])])
def test_the_scheduling_of_a_rank_is_changed_where_it_is_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, policy: int, then: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: policy)
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, new, parameters: chosen.append(new))
    Gloo().prepare()
    assert chosen == then


# Devices


class Module:
    """torch's module of a type of device, which notes what is called."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def set_device(self, device: Any) -> None:
        self.called.append(device)

    def manual_seed_all(self, seed: int) -> None:
        self.called.append(seed)

    def synchronize(self) -> None:
        raise RuntimeError("an illegal access\nand more")

    def set_stream(self, stream: object) -> None:
        self.called.append(stream)

    def is_initialized(self) -> int:
        return 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    found = Module()
    monkeypatch.setattr(torch, "get_device_module", {"cuda": found, "mtia": SimpleNamespace()}.__getitem__)
    return found


def test_a_device_is_used_by_what_torchs_module_of_its_type_has(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cuda, cpu, other = Device("cuda"), Device("cpu"), Device("mtia")
    cpu.use(torch.device("cpu"), ("7",))
    cuda.use(torch.device("cuda", 1), ())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    cuda.use(torch.device("cuda", 1), ("5", "7"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    cuda.seed(3)
    cuda.use_stream("stream")
    cuda.reset_peak_memory()
    assert module.called == [torch.device("cuda", 1)] * 2 + [3, "stream"]
    assert (cuda.error(), cuda.stream(), cuda.is_used(), cuda.has_module) == (
        "an illegal access",
        None,
        True,
        True,
    )
    assert (other.error(), other.is_used(), other.count()) == ("", False, 0)


def test_ranks_without_a_lease_are_spread_over_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, indices in ((2, [0, 1, 0]), (0, [0, 0, 0])):
        monkeypatch.setattr(Device, "count", lambda _, count=count: count)
        assert [Device("mtia").of_rank(rank, ()).index for rank in range(3)] == indices
    assert Device("cpu").of_rank(1, ()) == torch.device("cpu")


def test_the_accelerator_of_a_machine_is_the_one_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [SimpleNamespace(type="xpu")]
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: found[0])
    assert accelerator() == Device("xpu")
    found[0] = None
    assert accelerator() is None
    with pytest.raises(ValueError, match=r"^torch\.distributed has no backend for it; it has one for cpu, "):
        _ = Device("nonsense").default_backend
    assert device.CPU == "cpu"
