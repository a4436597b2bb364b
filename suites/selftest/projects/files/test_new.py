import pytest

pytestmark = pytest.mark.ranks(2)


def test_a(world):
    pass
