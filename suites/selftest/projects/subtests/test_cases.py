"""Subtests that fail, skip, disagree or die on one rank."""

import os
import time

import pytest

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


def test_one_bad_case(world, run_subtests):
    def claim(a, b):
        group = dist.group.WORLD  # which the traceback keeps alive
        assert world.rank == 0 or (a, b) != (2, "x")
        world.assert_same([a, b, torch.rand(2)])
        with open(f"reached-{world.rank}.txt", "a") as file:
            print(a, b, file=file)

    run_subtests({"a": [1, 2, 3], "b": ["x", "y"]}, claim)


def test_work_in_flight(world, run_subtests):
    def claim(a):
        if world.rank == 1 and a == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            raise ValueError("left work in flight")
        assert world.gather(a) == [a, a]

    run_subtests({"a": [0, 1]}, claim)


def test_skips_must_agree(world, run_subtests):
    def claim(a):
        if a == 0 or (a == 1 and world.rank == 1):
            pytest.skip("no")
        if a == 2:
            assert world.gather(a) == [a, a]

    run_subtests({"a": [0, 1, 2]}, claim)


def test_skipped_cases_are_skipped(world, run_subtests):
    run_subtests({"all": [0]}, lambda all: pytest.skip("not today"))
    run_subtests({"a": [2], "b": ["x"]}, lambda a, b: world.barrier())


def test_the_same_settings_twice(world, run_subtests):
    def first(a):
        raise ValueError("in the first")

    def second(a):
        raise ValueError("in the second")

    run_subtests({"a": [1]}, first)
    run_subtests({"a": [1]}, second)


def test_ranks_disagree_on_the_cases(world, run_subtests):
    run_subtests({"a": [world.rank, 2]}, lambda a: None)


def test_a_rank_leaves_early(world, run_subtests):
    if world.rank == 0:
        run_subtests({"a": [1, 2]}, lambda a: None)


def test_cases_after_that_pass(world, run_subtests):
    run_subtests({"a": [1, 2]}, lambda a: world.barrier())


def test_all_meet_before_the_next_case(world, run_subtests, monkeypatch):
    from lockstep.rank.process_group import DefaultGroup

    join = DefaultGroup.join

    def join_late(group):
        join(group)
        time.sleep(0.3 * world.rank)
        (world.shared_tmp_path / f"met-{world.rank}").touch()

    monkeypatch.setattr(DefaultGroup, "join", join_late)

    def claim(a):
        assert {path.name for path in world.shared_tmp_path.iterdir()} == {"met-0", "met-1"}

    run_subtests({"a": [1, 2]}, claim)


def test_death_in_a_case(world, run_subtests):
    run_subtests({"a": [1, 2]}, lambda a: os._exit(5) if a == 2 and world.rank else world.barrier())
