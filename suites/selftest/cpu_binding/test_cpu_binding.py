"""CPUs of their own for ranks: which ones they get, and that all of their threads keep to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.features.cpu_binding import plugin
from lockstep.place import Place
from suites.selftest.project import Project


def spec(rank: int, size: int, worker: str = "master", workers: int = 1, place: Place | None = None) -> Any:
    session = SimpleNamespace(workerinput={"workerid": worker, "workercount": workers})
    return SimpleNamespace(rank=rank, key=SimpleNamespace(size=size), session=session, place=place)


def place(local_rank: int, local_size: int) -> Place:
    return Place(1, ("a", "b"), 1, local_rank, local_size, "10.0.0.2", "10.0.0.1")


@pytest.fixture
def on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose cores have one hardware thread each."""
    monkeypatch.setattr(plugin, "_core", lambda cpu: cpu)


@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize(
    ("rank", "cpus", "own"),
    [
        pytest.param(spec(0, 2), {0, 1}, {0}, id="first"),
        pytest.param(spec(1, 2), {0, 1}, {1}, id="second"),
        pytest.param(spec(1, 2), {3, 5, 7, 9, 11}, {7, 9}, id="some-cpus"),
        pytest.param(spec(2, 3), {0, 1}, {0, 1}, id="too-few"),
        pytest.param(spec(0, 1), {0, 1}, {0, 1}, id="alone"),
        pytest.param(spec(0, 1, "gw1", 2), {0, 1}, {1}, id="alone-in-a-worker"),
        pytest.param(spec(1, 2, "gw0", 2), range(6), {1}, id="second-of-a-worker"),
        pytest.param(spec(0, 3, "gw1", 2), range(6), {3}, id="first-of-a-larger-world"),
        pytest.param(spec(0, 2, "gw1", 2), range(6), {3}, id="first-of-a-smaller-world"),
        pytest.param(spec(1, 2, "gw1", 2), {0, 1}, {1}, id="one-for-a-worker"),
        pytest.param(spec(3, 4, "gw1", 2), range(4), {2, 3}, id="too-few-in-a-worker"),
        pytest.param(spec(1, 2, "gw1", 3), {0, 1}, {0, 1}, id="too-few-for-all-workers"),
        pytest.param(spec(0, 2, "gw2", 2), range(4), {0, 1, 2, 3}, id="worker-in-the-place-of-another"),
        pytest.param(spec(0, 2, "foo", 2), range(4), {0, 1, 2, 3}, id="worker-with-a-name"),
        pytest.param(spec(3, 4, place=place(1, 2)), {0, 1}, {1}, id="second-host"),
    ],
)
def test_a_rank_has_its_part_of_the_cpus(rank: Any, cpus: Iterable[int], own: set[int]) -> None:
    assert plugin.cpus_of(rank, cpus) == own


def test_ranks_share_no_core_that_has_two_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_core", lambda cpu: cpu % 4)
    assert [plugin.cpus_of(spec(rank, 2), range(8)) for rank in range(2)] == [{0, 4, 1, 5}, {2, 6, 3, 7}]


def test_the_core_of_a_cpu_is_the_first_of_its_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for siblings in ("2-3\n", "2,6\n", "2\n"):
        monkeypatch.setattr(plugin.Path, "read_text", lambda path, text=siblings: text)
        assert plugin._core(6) == 2
    monkeypatch.undo()
    assert plugin._core(10**6) == 10**6  # no such directory


CPUS_OF_ALL_THREADS = """
import contextlib
import json
import os

import torch
import torch.distributed as dist


def test_threads(world):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    cpus = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cpus.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
    with open(f"cpus-{world.rank}.json", "w") as file:
        json.dump(sorted(cpus), file)
"""


@pytest.mark.parametrize(
    ("option", "backend"),
    [("none", "gloo"), ("exclusive", "gloo"), ("exclusive", "shm")],
    ids=["none", "exclusive", "exclusive-on-shm"],
)
def test_all_threads_of_a_rank_keep_to_its_cpus(project: Project, option: str, backend: str) -> None:
    project.write(CPUS_OF_ALL_THREADS, f"ranks_cpu_binding = {option}")
    assert "1 passed" in project.run(f"--backend={backend}")
    found = [json.loads((project.path / f"cpus-{rank}.json").read_text()) for rank in range(2)]
    everything = os.sched_getaffinity(0)
    ranks = [spec(rank, 2) if option == "exclusive" else spec(0, 1) for rank in range(2)]
    assert found == [[sorted(plugin.cpus_of(rank, everything))] for rank in ranks]


@pytest.mark.parametrize(("device", "bound"), [("cpu", 1), ("cuda", 0)])
def test_a_rank_with_a_gpu_is_not_bound(monkeypatch: pytest.MonkeyPatch, device: str, bound: int) -> None:
    rank = spec(0, 2)
    rank.key.device = device
    config = Mock()
    config.getini.return_value = "exclusive"
    config.pluginmanager.get_plugin.return_value.rank.spec = rank
    bind = Mock()
    monkeypatch.setattr(plugin, "bind", bind)
    plugin.pytest_configure(config)
    assert bind.call_count == bound


def test_another_value_is_refused(pytester: pytest.Pytester) -> None:
    with pytest.raises(pytest.UsageError, match=r"^ranks_cpu_binding = 'core': choose none, exclusive$"):
        pytester.parseconfigure("-o", "ranks_cpu_binding=core")


def test_where_no_process_may_be_bound_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def refuse(thread: int, cpus: set[int]) -> None:
        refused.append(thread)
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    plugin.bind({0})
    assert len(refused) == 1


def test_a_thread_that_has_ended_leaves_the_others_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []

    def bind_unless_gone(thread: int, cpus: set[int]) -> None:
        if thread == 5:
            raise ProcessLookupError(3, "no such process")
        bound.append(thread)

    monkeypatch.setattr(os, "listdir", lambda path: ["4", "5", "6"])
    monkeypatch.setattr(os, "sched_setaffinity", bind_unless_gone)
    plugin.bind({0})
    assert bound == [4, 6]
