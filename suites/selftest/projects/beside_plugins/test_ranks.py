"""Tests on ranks, as of a project that has other plugins as well: torch is imported in ranks alone."""

import os
import random

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def shared(world):
    return world.rank


@pytest.mark.parametrize("number", range(4))
def test_passes(world, shared, number, tmp_path):
    assert world.gather(shared) == [0, 1]


def test_fails_on_one(world):
    assert [world.rank] == [0]


def test_fails_on_all(world):
    world.barrier()
    raise ValueError("on each rank")


def test_fails_in_set_up(world, request):
    request.getfixturevalue("no_such_fixture")


def test_skips(world):
    pytest.skip("for a reason")


@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(world):
    raise ValueError("as expected")


def test_cases(world, run_subtests):
    def claim(number):
        assert number < 2

    run_subtests({"number": [1, 2]}, claim)


def test_same_numbers(world):
    import torch

    world.assert_same(random.random())
    world.assert_same(torch.rand(1).item())


def test_dies(world):
    if world.rank == 1:
        os._exit(3)
    world.barrier()
