"""Memory of a rank: what tests have freed, and what remembers them, does not stay to the last test."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lockstep.rank.dtensor_internals import DROP_EVERY, DTensorResults, _take_ended_groups

pytestmark = pytest.mark.ranks(2)

MEBI = 2**20
kept: list[Any] = []


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mesh_of_result(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a result on `mesh`: the one of an equal mesh where that result is remembered."""
    return (DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).detach() * 2).device_mesh


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def default_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


# What is freed


def test_300_mebibytes_are_freed_below_a_block_that_stays():
    kept.append(resident())
    # Too small for a mapping of their own: the last one keeps the allocator from giving back those below it.
    blocks = [bytearray(64 * 1024) for _ in range(4800)]
    kept.append(blocks[-1])
    assert resident() > kept[0] + 200 * MEBI  # a busy machine may have taken back pages of what is idle


def test_they_are_given_back():
    assert resident() < kept[0] + 80 * MEBI


# Fixtures


@pytest.fixture
def narrow(world, request):
    kept.append(weakref.ref(request))


@pytest.mark.parametrize("test", [0, 1, 2])
def test_requests_of_ended_tests_are_not_kept_by_wide_fixtures(narrow, test):
    gc.collect()
    living = [request for each in kept if isinstance(each, weakref.ref) and (request := each()) is not None]
    assert len(living) == 1


# DTensor


@pytest.fixture(scope="module")
def first_mesh():
    """A mesh whose result the first test of these has let torch remember."""
    mesh = default_mesh()
    assert mesh_of_result(mesh) is mesh
    return mesh


def test_results_of_operators_are_remembered(first_mesh):
    assert mesh_of_result(default_mesh()) is first_mesh


def test_they_are_until_the_groups_change(first_mesh):
    assert mesh_of_result(default_mesh()) is first_mesh
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh == first_mesh
    assert mesh_of_result(mesh) is mesh
    dist.barrier()  # a rank may not end the group while the other still connects to it
    dist.destroy_process_group(group)


def test_results_of_other_groups_are_forgotten():
    mesh = default_mesh()
    assert mesh_of_result(mesh) is mesh


def test_a_mesh_that_torch_keeps_loses_groups_that_have_ended(world):
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(3)]
    held = [meshes[1].get_group()]
    dist.barrier()
    for mesh in meshes[:2]:
        dist.destroy_process_group(mesh.get_group())
    threads = count_threads()
    _take_ended_groups()
    assert count_threads() < threads
    assert [len(mesh._pg_registry) for mesh in meshes] == [0, 1, 1]
    held.clear()
    _take_ended_groups()
    assert [len(mesh._pg_registry) for mesh in meshes] == [0, 0, 1]
    dist.barrier()
    dist.destroy_process_group(meshes[2].get_group())


def parts() -> DTensor:
    # torch 2.15 takes its own rule before a registered one, for operators that it has one of a new form for.
    complex_ones = torch.ones(1, 3, dtype=torch.complex64)
    return torch.view_as_real(DTensor.from_local(complex_ones, default_mesh(), [Shard(0)]))


def test_an_operator_follows_the_rule_of_torch():
    assert parts().placements == (Shard(0),)


def test_a_rule_that_a_later_test_registers_counts():
    @register_sharding(torch.ops.aten.view_as_real.default)
    def replicated(x):
        return [([Replicate()], [Replicate()])]

    assert parts().placements == (Replicate(),)


def test_results_are_dropped_now_and_then():
    results = DTensorResults()
    mesh = mesh_of_result(default_mesh())
    for _ in range(DROP_EVERY - 1):
        results.end_test()
    assert mesh_of_result(default_mesh()) is mesh
    results.end_test()
    assert mesh_of_result(default_mesh()) is not mesh
