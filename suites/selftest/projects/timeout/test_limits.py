"""Run with `--timeout=0.7`. The first test comes while ranks start, which takes longer than that."""

import time

import pytest

on_ranks = pytest.mark.ranks(2)


def hang(world):
    if world.rank == 1:
        time.sleep(60)
    world.barrier()


@on_ranks
def test_first(world):
    world.barrier()


@on_ranks
def test_option(world):
    hang(world)


@on_ranks
@pytest.mark.timeout(0.5)
def test_mark(world):
    hang(world)


@pytest.mark.ranks(2, timeout=0.4)
@pytest.mark.timeout(60)
def test_both(world):
    hang(world)


@on_ranks
@pytest.mark.timeout(0.5, func_only=True, method="thread")
def test_of_the_function(world):
    hang(world)


@on_ranks
@pytest.mark.timeout(0)
def test_without_a_limit(world):
    time.sleep(1)


@pytest.mark.timeout(0.5)
def test_plain():
    time.sleep(60)
