"""Tests that break, hold, hang, and break in some cases."""

import os

import pytest

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_breaks_on_one_rank(engine, world):
    assert world.rank == 0


def test_holds(engine, world):
    pass


def test_hangs(engine, world):
    while True:
        pass


def test_of_no_engine_is_not_meant_though_it_is_called_test_breaks(world):
    pass


def test_cases(engine, world, run_subtests):
    def check(n):
        if n == 1:
            assert world.rank == 0
            dist.all_reduce(torch.ones(1))

    run_subtests({"n": [0, 1, 2, 3]}, check)
