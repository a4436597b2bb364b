"""Tests under schedules of the mark; run without `--skew`."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


@pytest.mark.skew(seeds=3)
def test_race(world):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    work.wait()


def test_the_same_race_undisturbed(world):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    work.wait()


@pytest.mark.skew(seeds=[4, 9], milliseconds=1)
def test_with_subtests_of_its_own(world, run_subtests):
    def claim(value):
        assert world.gather(value) == [value, value]

    run_subtests({"value": [1, 2]}, claim)


@pytest.mark.skew(seeds=[4])
def test_race_in_a_case(world, run_subtests):
    def claim(value):
        tensor = torch.ones(value)
        work = dist.all_reduce(tensor, async_op=True)
        if value == 2:
            tensor.sum()
        work.wait()

    run_subtests({"value": [1, 2]}, claim)


@pytest.mark.skew(seeds=0)
def test_wrong_mark(world):
    pass
