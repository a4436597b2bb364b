import pytest
from inline_snapshot import snapshot


@pytest.mark.ranks(2)
def test_on_ranks(world):
    assert 2 * world.size == snapshot(4)


@pytest.mark.ranks(2)
def test_another_value(world):
    assert world.size == snapshot(3)


def test_plain():
    assert snapshot() == 1 + 4
