"""Groups of some ranks, groups split off, meshes of two axes."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from suites.selftest.shm.samples import same, sample

only_shm = pytest.mark.parametrize("backend", ["shm"])


def total(group: dist.ProcessGroup) -> float:
    dist.all_reduce(tensor := torch.tensor(dist.get_rank() + 1.0), group=group)
    return tensor.item()


@pytest.mark.ranks(3)
def test_a_group_of_some_ranks(world, backend):
    group = dist.new_group([0, 2], backend=backend)
    if world.rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        return
    assert (dist.get_rank(group), dist.get_world_size(group)) == ((0, 2) if world.rank == 0 else (1, 2))
    assert dist.get_process_group_ranks(group) == [0, 2]
    assert total(group) == 4
    dist.broadcast(tensor := sample(world.rank), 2, group=group)  # a rank of the world
    assert same(tensor, sample(2))
    dist.broadcast(tensor := sample(world.rank), group_src=0, group=group)
    assert same(tensor, sample(0))
    dist.destroy_process_group(group)


@pytest.mark.ranks(4)
def test_overlapping_groups(world, backend):
    groups = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [1, 2], [2, 3], [0, 3])]
    for _ in range(3):
        totals = [total(group) for group in groups if world.rank in dist.get_process_group_ranks(group)]
        assert totals == {0: [3, 5], 1: [3, 5], 2: [5, 7], 3: [7, 5]}[world.rank]
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(2)
def test_what_torch_says_of_a_group(world, group):
    assert dist.get_backend(group) == "shm"
    assert group.name() == "shm"
    assert dist.get_backend_config(group) == "cpu:shm"
    assert (group.rank(), group.size()) == (world.rank, 2)
    assert [device.type for device in group._device_types] == ["cpu"]


@pytest.mark.ranks(2)
def test_a_hundred_groups_one_after_the_other(world):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        group = dist.new_group(backend="shm")
        assert total(group) == 3
        dist.destroy_process_group(group)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


@pytest.mark.ranks(2)
def test_groups_of_a_rank_alone(world):
    groups = [dist.new_group([rank], backend="shm") for rank in range(2)]
    assert total(groups[world.rank]) == world.rank + 1
    dist.destroy_process_group(groups[world.rank])


@pytest.mark.ranks(2)
def test_local_synchronization(world):
    group = dist.new_group([0, 1], backend="shm", use_local_synchronization=True)
    assert total(group) == 3
    dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(4)
def test_split_group_of_the_group(world, group):
    # `dist.split_group` wants an accelerator; the group's method is what it calls.
    halves = [[0, 1], [2, 3]]
    half = group.split_group(
        halves[world.rank // 2], group_name=f"half {world.rank // 2}", group_desc="a half"
    )
    assert (half.rank(), half.size()) == (world.rank % 2, 2)
    assert (half.group_name, half.group_desc) == (f"half {world.rank // 2}", "a half")
    half.allreduce([tensor := torch.tensor([world.rank + 1.0])]).wait()
    assert tensor.item() == (3 if world.rank < 2 else 7)
    half.shutdown()


@pytest.mark.ranks(4)
def test_a_mesh_of_two_axes(world):
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "shm", "tp": "shm"}
    )
    assert total(mesh.get_group("tp")) == (3 if world.rank < 2 else 7)
    assert total(mesh.get_group("dp")) == (4 if world.rank % 2 == 0 else 6)
    assert dist.get_backend(mesh["dp"].get_group()) == "shm"


@only_shm
@pytest.mark.ranks(2)
def test_a_mesh_of_a_group(world, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh.size() == 2
    assert total(mesh.get_group()) == 3


@pytest.mark.ranks(2)
def test_a_timeout_says_whom_it_waited_for(world):
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=0.2))
    if world.rank == 0:
        with pytest.raises(dist.DistError, match=r"all_reduce") as error:
            dist.all_reduce(torch.ones(1), group=group)
        assert "rank 1" in str(error.value)
        assert "0.2" in str(error.value)
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(3)
def test_monitored_barrier_names_who_is_missing(world):
    group = dist.new_group(backend="shm")
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="rank 2"):
            group.monitored_barrier(timedelta(seconds=0.3))
    elif world.rank == 1:
        with pytest.raises(RuntimeError, match=r"rank [02]"):
            group.monitored_barrier(timedelta(seconds=0.3))
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(3)
def test_monitored_barrier_of_all_ranks_names_each_missing(world):
    group = dist.new_group(backend="shm")
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 .*rank 2 "):
            group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_barrier_may_have_its_own_timeout(world):
    group = dist.new_group(backend="shm")
    if world.rank == 0:
        options = dist.BarrierOptions()
        options.timeout, options.asyncOp = timedelta(seconds=0.2), False
        with pytest.raises(dist.DistError, match=r"barrier .* timed out after 0\.2 s: .*rank 1"):
            group.barrier(options)
    dist.barrier()
    dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(2)
def test_the_backend_of_a_group_is_the_group(world, group):
    backend = group._get_backend(torch.device("cpu"))
    assert backend.name() == "shm"
    assert not backend.supports_splitting
    group.set_timeout(timedelta(seconds=77))
    assert backend.options._timeout == timedelta(seconds=77)
    with pytest.raises(RuntimeError, match="cuda"):
        group._get_backend(torch.device("cuda"))
