import pytest


@pytest.mark.ranks(2)
def test_on_ranks(world, benchmark):
    benchmark(world.barrier)


def test_plain(benchmark):
    assert benchmark(lambda: 3) == 3
