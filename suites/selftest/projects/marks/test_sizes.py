import pytest


@pytest.mark.ranks(1, 2)
def test_x(world):
    pass


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["half", "float"])
def test_y(world, dtype):
    pass


@pytest.mark.ranks(2, 4)
class TestZ:
    def test_without_the_fixture(self):
        pass
