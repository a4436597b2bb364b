import pytest


@pytest.mark.ranks(2)
def test_equal(world, data_regression):
    data_regression.check({"size": world.size})


@pytest.mark.ranks(2)
def test_different(world, data_regression):
    data_regression.check({"rank": world.rank})
