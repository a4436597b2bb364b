"""Tests that the next one must not follow before they are reported; ranks have its order while they run."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from notes import note

pytestmark = pytest.mark.ranks(2)


def fails_on_one(world):
    assert world.rank == 0, "as it should"


def dies_on_one(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def exits_on_one(world):
    if world.rank == 1:
        os._exit(3)


def hangs_on_one(world):
    if world.rank == 1:
        time.sleep(60)


def stands_still(world):
    if world.rank == 1:
        dist.barrier()


def skips_on_one(world):
    if world.rank == 1:
        pytest.skip("on one rank")


def skips_on_all(world):
    pytest.skip("on all ranks")


def xfails_on_all(world):
    pytest.xfail("on all ranks")


def is_interrupted_on_one(world):
    if world.rank == 1:
        raise KeyboardInterrupt


def warns_on_one(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if world.rank == 1:
            warnings.warn("as it should", UserWarning, stacklevel=1)


def leaves_a_thread_on_one(world):
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


def leaves_a_collective_on_one(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def ends_its_group(world):
    dist.destroy_process_group()


FAULTS = [
    *(fails_on_one, dies_on_one, exits_on_one, hangs_on_one, stands_still, skips_on_one, skips_on_all),
    *(xfails_on_all, is_interrupted_on_one, warns_on_one, leaves_a_thread_on_one),
    *(leaves_a_collective_on_one, ends_its_group),
]


def after(world, name):
    note(world, f"after-{name}")
    assert name in Path("reported.txt").read_text().split()
    assert world.gather(world.rank) == [0, 1]


def make_pair(fault):
    @pytest.mark.ranks(2, timeout=2.0)
    def test(world):
        fault(world)

    def test_after(world):
        after(world, f"test_{fault.__name__}")

    return test, test_after


for fault in FAULTS:
    name = fault.__name__
    globals()[f"test_{name}"], globals()[f"test_after_{name}"] = make_pair(fault)


def test_set_up_fails_on_one(breaks_in_set_up):
    pass


def test_after_set_up(world):
    after(world, "test_set_up_fails_on_one")


def test_tear_down_fails_on_one(breaks_in_tear_down):
    pass


def test_after_tear_down(world):
    after(world, "test_tear_down_fails_on_one")


def test_subtest_fails_on_one(world, subtests):
    with subtests.test("a"):
        assert world.rank == 0, "as it should"


def test_after_subtest(world):
    after(world, "test_subtest_fails_on_one")
