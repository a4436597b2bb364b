"""A test on ranks, and one in the controller."""

import pytest


@pytest.mark.ranks(2)
def test_x(world, tmp_path):
    assert world.gather(1) == [1, 1]


def test_y(tmp_path):
    pass
