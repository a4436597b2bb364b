"""Marks of single parameters."""

import pytest


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.ranks(2)),
        pytest.param(3, marks=pytest.mark.ranks(3, backend="shm")),
        1,
    ],
)
def test_of_parameters(world, size):
    assert world.size == size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.ranks(3))])
def test_of_one_parameter(world, size):
    assert world.gather(world.rank) == list(range(size))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("size", [pytest.param(5, marks=pytest.mark.ranks(5))])
def test_refused(world, size):
    pass


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ranks(2))])
class TestClass:
    def test_of_the_class(self, world, size):
        assert world.size == size
