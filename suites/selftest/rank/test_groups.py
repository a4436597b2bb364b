"""Process groups that a test leaves: they end when every rank has ended the test, and not before."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def files_of_groups(pid: int) -> Counter[str]:
    """Return what groups are made of: sockets on gloo, anonymous memory on shm."""
    files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(file)]
    return Counter(file for file in files if file.startswith(("socket:", "/memfd:lockstep-shm")))


def test_groups_stay_while_another_rank_is_in_the_test(world):
    pids = world.gather(os.getpid())
    before = files_of_groups(pids[0])
    world.barrier()
    world.mesh(2, 1, names=("replicate", "shard"))
    world.barrier()
    made = files_of_groups(pids[0]) - before  # of `before` some may be closed by now
    assert made
    world.barrier()
    if world.rank == 1:
        time.sleep(0.3)  # while rank 0 ends the test
        assert made <= files_of_groups(pids[0])


def test_groups_are_gone_in_the_next_test():
    assert len(dist.distributed_c10d._world.pg_map) == 1


@pytest.mark.ranks(2, backend="gloo")
def test_threads_of_gloo_do_not_take_the_core_of_what_wakes_them():
    threads = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
    assert len(threads) >= 2
    assert {os.sched_getscheduler(int(task.name)) for task in threads} == {os.SCHED_BATCH}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("turn", range(12))
def test_halves_that_make_a_group_of_one_name_in_each_test(world, turn):
    """torch names a group of `use_local_synchronization` by its ranks and by how many groups there are."""
    half = [0, 1] if world.rank < 2 else [2, 3]
    group = dist.new_group(half, use_local_synchronization=True)
    dist.all_reduce(total := torch.tensor(world.rank + 1.0), group=group)
    assert total.item() == (3 if world.rank < 2 else 7)
    dist.destroy_process_group(group)
