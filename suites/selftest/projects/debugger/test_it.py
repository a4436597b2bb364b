"""Failures and breakpoints in all phases of tests."""

import os
import pathlib
import time

import pytest

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2, timeout=0.5)


def meet():
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return ranks.item()


def test_failure(world):
    word = "said"
    print(word)
    assert world.rank == 0, "the news"
    meet()


def test_after_it(world):
    assert world.gather(world.rank) == [0, 1]


@pytest.fixture
def broken(world):
    inside = ["the", "fixture"]
    if world.rank == 1:
        raise ValueError("in set-up")


def test_set_up(broken):
    pass


@pytest.fixture
def late(world):
    yield
    assert world.rank == 0, "in tear-down"


def test_tear_down(world, late):
    assert world.rank == 0, "before it"
    while not pathlib.Path("go").exists():
        time.sleep(0.05)


def test_breakpoints(world, capfd):
    ranks = 0
    breakpoint()  # skipped
    ranks += meet()
    pytest.set_trace()  # skipped
    assert ranks == 2
    notes = capfd.readouterr().err.splitlines()
    note = "breakpoint in rank 0 of 2: skipped, because the debugger is in rank 1"
    source = enumerate(pathlib.Path(__file__).read_text().splitlines(), 1)
    lines = [number for number, line in source if line.endswith("# skipped")]
    assert notes == ([f"test_it.py:{line}: {note}" for line in lines] if world.rank == 0 else [])


@pytest.mark.xfail(raises=AssertionError)
def test_expected(world):
    assert world.rank == 0


def test_cases(world, run_subtests):
    def claim(n):
        assert n != 10 * world.rank

    run_subtests({"n": [0, 10, 11]}, claim)


@pytest.mark.ranks(1)
def test_world_without_that_rank(world):
    assert world.size == 2


def test_quit(world):
    assert world.rank == 1, "the other rank failed long ago"
    time.sleep(0.6)
    pytest.set_trace()
    meet()


def test_never_run(world):
    pass
