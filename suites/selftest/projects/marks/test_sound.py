import pytest


@pytest.mark.ranks(2)
def test_x(world):
    pass
