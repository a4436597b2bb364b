import pytest

pytestmark = pytest.mark.ranks(2)


def test_gone(world):
    pass


def test_stays(world):
    pass
