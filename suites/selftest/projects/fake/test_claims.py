import unittest

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.ranks(2, needs=())
def test_needs_nothing(world):
    assert world.mesh().size() == 2


@pytest.mark.ranks(2)
def test_needs_values(world):
    assert world.gather(world.rank) == [0, 1]


@pytest.mark.ranks(2, needs=(), group=False)
def test_makes_its_group():
    raise NotImplementedError


@pytest.mark.ranks(3, needs=())
@given(st.integers(0, 9))
def test_property(world, number):
    assert number < 10


def test_unmarked():
    pass


@pytest.mark.ranks(2)
class TestOfUnittest(unittest.TestCase):
    def test_values_of_unittest(self):
        raise NotImplementedError
