"""Tests that fail in their first runs. Each run leaves a line in runs.txt, and its process in pids.txt."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks(2)


class Flaky(Exception):
    pass


@pytest.fixture
def runs_before(request, world):
    """The number of earlier runs of the test; rank 1 counts."""

    def run():
        name = request.node.name
        before = Path("runs.txt").read_text().split().count(name) if Path("runs.txt").exists() else 0
        with open("runs.txt", "a") as runs, open("pids.txt", "a") as pids:
            runs.write(f"{name}\n")
            pids.write(f"{os.getpid()}\n")
        return before

    return world.gather(run() if world.rank == 1 else None)[1]


def fail(world, runs_before, times, error):
    if world.rank == 1 and runs_before < times:
        raise error
    world.barrier()


@pytest.mark.flaky(reruns=2, reruns_delay=0.2)
def test_twice(world, runs_before):
    fail(world, runs_before, 2, Flaky("not yet"))


def test_after(runs_before):
    pass


@pytest.mark.flaky(reruns=1, only_rerun="died: SIGKILL")
def test_dies(world, runs_before):
    if world.rank == 1 and not runs_before:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


@pytest.mark.flaky(reruns=1, only_rerun=Flaky)
def test_of_a_class(world, runs_before):
    try:
        fail(world, runs_before, 1, Flaky("not yet"))
    except Flaky as error:
        raise KeyError("outer") from error


@pytest.mark.flaky(reruns=1, only_rerun="Flaky: another text")
def test_of_another_text(world, runs_before):
    fail(world, runs_before, 1, Flaky("not yet"))


@pytest.mark.flaky(reruns=1, condition=lambda error: isinstance(error, KeyError))
def test_on_a_condition(world, runs_before):
    fail(world, runs_before, 1, ValueError("no such error"))


@pytest.mark.flaky(reruns=1)
def test_with_subtests(runs_before, subtests):
    with subtests.test("fails once"):
        assert runs_before


@pytest.mark.flaky(reruns=1)
def test_in_tear_down(request, world, runs_before):
    request.addfinalizer(lambda: fail(world, runs_before, 1, Flaky("not yet")))


@pytest.mark.flaky(reruns=1)
def test_always(world, runs_before):
    fail(world, runs_before, 9, Flaky("never"))
