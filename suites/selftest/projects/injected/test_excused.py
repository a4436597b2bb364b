"""Failures beside a fault that is expected: all of these tests but the last have to fail."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

on_2, on_3 = pytest.mark.ranks(2), pytest.mark.ranks(3)


def total():
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist()


def die(how=signal.SIGKILL):
    os.kill(os.getpid(), how)
    signal.pause()


@pytest.fixture
def lost(world, faults):
    """Rank 1 of 3 dies as the test expects."""
    faults.kill(rank=1, before="all_reduce")
    with faults.expect("died: SIGKILL"):
        total()


@pytest.fixture
def dies_in_teardown(world):
    yield
    if world.rank == 2:
        die()


@on_3
def test_death_after_it(world, lost):
    if world.rank == 2:
        die()


@on_3
def test_death_in_teardown(dies_in_teardown, lost):
    pass


@on_2
def test_death_after_a_failure(world, faults):
    with faults.fail(ValueError("x"), rank=1, before="barrier"), faults.expect("rank 1 of 2"):
        dist.barrier()
    if world.rank == 1:
        die(signal.SIGTERM)


@on_3
def test_death_before_it(world, faults):
    if world.rank == 1:
        die()
    with faults.expect("rank 1 of 3 died"):
        total()


@on_3
def test_nothing_in_the_second(world, faults, lost):
    world.rebuild()
    with faults.expect("died: SIGKILL"):
        assert total() == [2, 2, 2]


@on_3
def test_an_error_in_the_second(world, faults, lost):
    world.rebuild()
    with faults.expect("died: SIGKILL"):
        raise RuntimeError("my plugin for gloo timed out")


@on_3
def test_a_fault_of_the_dead(world, faults, lost):
    world.rebuild()
    faults.kill(rank=1, before="all_reduce")


@on_3
def test_a_hang_after_a_death(world, faults, lost):
    with pytest.raises(RuntimeError, match="no standstill is found before the others have called"):
        faults.hang(rank=2, before="all_reduce")
    world.rebuild()
    faults.hang(rank=2, before="all_reduce")
    with faults.expect("which rank 2 never reached: it is in an injected hang", within=0.1):
        total()
    raise AssertionError("a claim of this test")


@on_3
def test_a_mismatch_after_rebuild(world, lost):
    world.rebuild()
    total()
    if world.rank == 0:
        total()
    else:
        dist.barrier()


@on_3
def test_a_send_after_rebuild(world, lost):
    new = world.rebuild()
    if new.rank == 0:
        dist.isend(torch.ones(2), 1)


@on_2
def test_a_bug_in_recovery(faults):
    faults.fail(ValueError("x"), rank=1, before="all_reduce")
    with faults.expect("rank 1 of 2 failed: ValueError"):
        try:
            total()
        except RuntimeError as error:
            raise KeyError("a bug in recovery") from error


@on_2
def test_a_failure_after_a_failure(faults):
    with faults.fail(ValueError("x"), rank=1, before="barrier"), faults.expect("failed: ValueError: x"):
        dist.barrier()
    raise AssertionError("a claim of this test")


@on_2
def test_nothing_struck(faults):
    faults.kill(rank=1, before="all_reduce", nth=9)
    with faults.expect("died: SIGKILL"):
        total()


@on_3
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_claims_of_one_rank(world, faults, run_subtests, where):
    """In the first case rank 2 does not get to the others' meeting; the second one is right."""

    def claim(value, at):
        assert (value, world.rank, at) != (1, 2, where), "a claim of rank 2"

    def case(value):
        claim(value, "before")
        with faults.fail(rank=1, before="barrier"):
            with faults.expect("failed: InjectedFault"):
                claim(value, "inside")
                dist.barrier()
            claim(value, "after")
        world.rebuild()

    run_subtests({"value": [1, 2]}, case)


@on_3
def test_a_case_without_rebuild(world, lost, run_subtests):
    def case(value):
        assert world.rank != 2, "a claim of rank 2"

    run_subtests({"value": [1, 2]}, case)


@on_3
def test_skipped_by_those_left(lost):
    pytest.skip("no way to go on")


@on_3
def test_no_rebuild_after_a_failure(world, faults):
    with faults.fail(rank=1, before="barrier"), faults.expect("failed: InjectedFault"):
        dist.barrier()
    dist.all_reduce(torch.ones(1))
