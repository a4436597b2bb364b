import pytest


def test_without_ranks(world, engine):
    assert (world, engine) == ("of the project", "steam")


def test_parametrized(collectives):
    assert collectives in ("stamps", "coins")


@pytest.mark.parametrize("world", [1, 2])
def test_an_argument_of_that_name(world):
    assert world in (1, 2)


@pytest.mark.ranks(2)
def test_on_ranks(world, engine, rank_world, rank_collectives, rank_golden):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2))
    assert (world, engine) == ("of the project", "steam")
    assert (rank_world.size, len(rank_collectives)) == (2, 1)
    assert repr(rank_golden) == "<goldens>"


@pytest.mark.ranks(2)
def test_cases(rank_world, rank_subtests):
    rank_subtests({"n": [1, 2]}, lambda n: rank_world.assert_same(n))
