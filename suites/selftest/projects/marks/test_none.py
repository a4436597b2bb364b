import pytest


@pytest.mark.ranks
def test_x(world):
    pass
