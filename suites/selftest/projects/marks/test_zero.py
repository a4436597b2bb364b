import pytest


@pytest.mark.ranks(0)
def test_x(world):
    pass
