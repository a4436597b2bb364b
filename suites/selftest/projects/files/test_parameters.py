import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("x", [1, 2])
def test_p(world, x):
    pass
